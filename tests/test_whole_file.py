import os
import subprocess
import sys
import threading

import pytest

from oracles.whole_file import draft_of, write_whole


def test_all_of_it_under_its_name(tmp_path):
    file = tmp_path / "record.json"
    for text in ("ä\n", "b"):
        write_whole(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert [*tmp_path.iterdir()] == [file]


def test_a_full_disk_leaves_what_was_there(tmp_path):
    file = tmp_path / "record.json"
    file.write_text("before")
    draft_of(file).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(file, "after")
    assert file.read_text() == "before"
    assert [*tmp_path.iterdir()] == [file]


def test_who_is_killed_while_writing_leaves_what_was_there(tmp_path):
    file = tmp_path / "record.json"
    file.write_text("before")
    code = (
        "import os, sys; from pathlib import Path; from oracles import whole_file;"
        "whole_file.os.fsync = lambda file: os.kill(os.getpid(), 9);"
        "whole_file.write_whole(Path(sys.argv[1]), 'after')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == -9
    assert file.read_text() == "before"
    assert draft_of(file).exists()
    write_whole(file, "after")
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("after", [file])


def test_what_is_no_plain_file_is_written_to_in_place(tmp_path):
    pipe, link, beyond = (tmp_path / name for name in ("pipe", "link", "beyond"))
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "text")
    reader.join(30)
    assert read == ["text"]
    beyond.write_text("before, and longer")
    link.symlink_to(beyond)
    write_whole(link, "after")
    assert (link.is_symlink(), beyond.read_text()) == (True, "after")


def test_a_folder_that_is_none_is_named(tmp_path):
    file = tmp_path / "none" / "record.json"
    with pytest.raises(FileNotFoundError, match=r"none/record\.json\.draft"):
        write_whole(file, "")
