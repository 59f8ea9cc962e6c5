"""What every test shares: surroundings that decide nothing, a seed of its own, memory that is never zero."""

import hashlib
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# What programs print, where they look for files, and what pytest is asked besides: of whoever runs the suite,
# not of the suite. Before anything that reads them on import.
THEIRS = (
    *("COLUMNS", "LINES", "TERM", "COLORTERM", "TERMINAL_WIDTH", "JUPYTER_COLUMNS", "JUPYTER_LINES"),
    *(
        "NO_COLOR",
        "FORCE_COLOR",
        "PY_COLORS",
        "CLICOLOR",
        "CLICOLOR_FORCE",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
    ),
    *("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_THEME", "GITHUB_ACTIONS", "MLA_VERIFY_GSM8K"),
)
THEIR_FAMILIES = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TYPER_", "_TYPER_")
for name in [name for name in os.environ if name in THEIRS or name.startswith(THEIR_FAMILIES)]:
    del os.environ[name]

hypothesis.settings.register_profile("ci", derandomize=True, max_examples=25, deadline=None, database=None)
hypothesis.settings.register_profile("deep", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("MLA_VERIFY_PROFILE", "ci"))

# Without a GPU, Triton kernels run in its interpreter; read once, when triton is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tensors are small here: threads would mostly wait for each other, and for those of parallel workers.
torch.set_num_threads(1)

# torch looks up which functions make tensors when a device is first made the default, and keeps what it
# found: not the wrappers of ``poisoned_empty``, past which layers would be made on the CPU, weights drawn.
with torch.device("meta"):
    assert torch.empty(0).is_meta


@pytest.fixture(scope="session", autouse=True)
def nobody_watches() -> Iterator[None]:
    """Tests do not know that they run in continuous integration; pytest's own summary at the end does."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CI", "BUILD_NUMBER"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """An integer that follows from the test's name and parameters alone."""
    return int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "little")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.empty`` returns NaN (or the largest integer), so that an element nobody wrote shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _filled(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _filled(torch.Tensor.new_empty))


def _filled(allocate):
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() and tensor.dim() and tensor.is_contiguous():
            tensor.view(torch.uint8).fill_(0xFF)  # by bytes: not every float8 type can be filled
        elif tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return poisoned
