import time
from pathlib import Path

import pytest

from gateway.config.admission import UsageLogConfig
from gateway.config.schema import Config
from gateway.journals import Journals


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("record", lambda path: Config(record=path)),
        ("usage_log.path", lambda path: Config(usage_log=UsageLogConfig(path=path))),
    ],
)
async def test_a_file_that_cannot_be_opened_is_told_with_its_key(
    key: str, make: object, tmp_path: Path
) -> None:
    path = str(tmp_path / "gone" / "file")
    assert callable(make)

    with pytest.raises(OSError, match=f"^{key}: {path}: No such file or directory$"):
        await Journals.open(make(path), time.monotonic)
