"""Models on the Hugging Face hub, downloaded by the hub's own library.

It shows bars on a terminal. Where there is none, in a container say, the log tells how far a download has come.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.core.errors import StartupError

log = logging.getLogger(__name__)

_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHTS = ["*.safetensors"]
# Subfolders but for 1_Pooling and additional_chat_templates, and second copies in another format.
_IGNORED = ["[!1a]*/*", "1[!_]*/*", "a[!d]*/*", "consolidated*"]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TELL_SECONDS = 5.0


def kept_commit(hub_id: str, revision: str | None, *, weights: bool) -> Path | None:
    """The folder of a commit in the local cache, if all of it is there: it does not change, so the hub is not asked."""
    if revision is None or not _COMMIT.fullmatch(revision):
        return None
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        return None
    wanted = _FILES + _WEIGHTS if weights else _FILES
    with suppress(errors.LocalEntryNotFoundError):
        folder = snapshot_download(
            hub_id, revision=revision, allow_patterns=wanted, ignore_patterns=_IGNORED, local_files_only=True
        )
        if not weights or any(Path(folder).glob("*.safetensors")):
            return Path(folder)
    return None


def download(hub_id: str, revision: str | None, *, weights: bool, otherwise: str) -> Path:
    """A folder of the local cache with the newest version, or with the one that is there if the hub cannot be
    reached. `otherwise` says what to do without a hub."""
    try:
        from huggingface_hub import constants, errors, file_download, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise StartupError(
            f"no folder {hub_id} here, and downloading it needs: pip install huggingface_hub", param="model"
        ) from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    cache = Path(constants.HF_HUB_CACHE)
    wanted = _FILES + _WEIGHTS if weights else _FILES
    try:
        with _told(hub_id, cache / file_download.repo_folder_name(repo_id=hub_id, repo_type="model") / "blobs"):
            return Path(snapshot_download(hub_id, revision=revision, allow_patterns=wanted, ignore_patterns=_IGNORED))
    except errors.GatedRepoError as error:
        raise StartupError(
            f"{hub_id} asks for consent: accept its terms on the hub, then run `hf auth login`", param="model"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(f"{hub_id} has no revision {revision} on the hub", param="model") from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"{hub_id} is neither a folder here nor on the hub, as far as this account may see: check the name, run "
            f"`hf auth login` for a private one, or {otherwise}",
            param="model",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        raise StartupError(
            f"{hub_id} is not in the local cache and the Hugging Face hub cannot be reached ({error}); {otherwise}",
            param="model",
        ) from error
    except Exception as error:  # of the network, of the disk, and of libraries below the hub's
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise StartupError(
                f"{hub_id} does not fit: no space is left in {cache}; set HF_HOME to a folder of a larger disk",
                param="model",
            ) from error
        problem = f"{type(error).__name__}: {error}"
        raise StartupError(
            f"the download of {hub_id} broke off ({problem}); the next start goes on where it did", param="model"
        ) from error


@contextmanager
def _told(hub_id: str, blobs: Path) -> Iterator[None]:
    """While something is downloaded into that folder, the log says so."""
    ended = threading.Event()
    telling = threading.Thread(target=_tell, args=(hub_id, blobs, ended), daemon=True)
    if not sys.stderr.isatty():
        telling.start()
    try:
        yield
    finally:
        ended.set()


def _tell(hub_id: str, blobs: Path, ended: threading.Event) -> None:
    began, first = time.monotonic(), _size(blobs)
    last = first
    while not ended.wait(_TELL_SECONDS):
        now = _size(blobs)
        if now != last:
            rate = (now - first) / (time.monotonic() - began)
            log.info("downloading %s: %.2f GB so far, %.0f MB/s", hub_id, now / 1e9, rate / 1e6)
        last = now


def _size(folder: Path) -> int:
    """Of the files in it, some of which may be on their way out."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
