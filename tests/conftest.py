from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line does; read when PyTorch is imported

from tests.pool import Ranks
from tests.small import write_corpus


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Run a function on several gloo ranks."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ.pop("DUFU_ERROR_FILE", None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of English documents, one a line."""
    path = tmp_path_factory.mktemp("corpus") / "topics.txt"
    write_corpus(path)
    return path
