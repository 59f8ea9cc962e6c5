"""Judging in worker processes: the same verdicts in the same order, and a crash that is a verdict."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context

import torch

from mla_ref.backend import Backend
from oracles.matrix import Job, trials
from oracles.verdict import CRASH, Verdict
from oracles.verify import DEFAULT, find_backend, judge


def judge_job(job: Job) -> list[Verdict]:
    """Every verdict of one job, backend by backend, under the names by which they were asked for."""
    return [
        replace(verdict, backend=spec, variant=name or DEFAULT)
        for spec in job.specs
        for backend in (find_backend(spec),)
        for name, oracles in trials(job, tuple(backend.variants))
        for verdict in judge(_alone_with(backend, name), job.case, device=job.device, oracles=oracles)
    ]


def _alone_with(backend: Backend, variant: str) -> Backend:
    """The backend with one function: its own, or that of a variant."""
    return replace(backend, fn=backend.variants[variant] if variant else backend.fn, variants={})


def judge_all(
    jobs: Sequence[Job], workers: int, finished: Callable[[], object] = lambda: None
) -> Iterator[list[Verdict]]:
    """The verdicts of each job, in the order of ``jobs`` whatever the order in which they end.

    workers: processes; 1 judges in this one, where an implementation that dies takes the judge along.
    finished: called once for each job as it ends.
    """
    if workers == 1:
        for job in jobs:
            yield judge_job(job)
            finished()
        return
    at = 0
    while at < len(jobs):
        for verdicts in _pooled(jobs[at:], workers, finished):
            yield verdicts
            at += 1
        if at < len(jobs):
            # The pool died, of this job or of one beside it: find out, and go on with a new pool.
            yield [verdict for spec in jobs[at].specs for verdict in _alone(jobs[at], spec)]
            finished()
            at += 1


def _pooled(jobs: Sequence[Job], workers: int, finished: Callable[[], object]) -> Iterator[list[Verdict]]:
    """The verdicts of each job in order, up to the first that was lost because a worker died."""

    def report(future: Future[list[Verdict]]) -> None:
        if not future.cancelled() and future.exception() is None:
            finished()

    with _executor(workers) as executor:
        futures = [executor.submit(judge_job, job) for job in jobs]
        for future in futures:
            future.add_done_callback(report)
        try:
            for future in futures:
                yield future.result()
        except BrokenProcessPool:
            return
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _alone(job: Job, spec: str) -> list[Verdict]:
    with _executor(1) as executor:
        try:
            return executor.submit(judge_job, job._replace(specs=(spec,))).result()
        except BrokenProcessPool:
            verdict = Verdict(
                status=CRASH,
                backend=spec,
                variant="",
                oracle="",
                case=job.case,
                device=job.device,
                detail="the process that ran it died",
            )
            return [verdict]


def _executor(workers: int) -> ProcessPoolExecutor:
    threads = max(1, (os.cpu_count() or 1) // workers)
    return ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(list(sys.path), threads),
    )


def _start_worker(path: list[str], threads: int) -> None:
    """Give a worker its parent's import path, which holds the working directory for strangers' modules."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once and without a traceback
    sys.path[:] = path
    torch.set_num_threads(threads)
