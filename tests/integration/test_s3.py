"""Checkpoints on a real S3 server, which is killed and started again while they are saved."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import TRAIN, Alone, Launched, digests, is_inside
from s3 import BUCKET, S3Server
from saved import NEVER, bits, group, save, schema, table, together, whole

from evergrad.checkpoint.catalogue import choose, entries, good, locate
from evergrad.checkpoint.export import export_model
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.retention import remove, remove_interrupted
from evergrad.checkpoint.storage import IMPATIENT, Retry, Storage
from evergrad.checkpoint.verify import verify
from evergrad.cli import _main
from evergrad.errors import CheckpointError, ConfigError, StorageError
from evergrad.optim import Adam

OF = schema([table("user", 3, Adam()), table("a b%é", 2)], groups=[group(head_weight=(3, 4))])


@contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """A server, and an environment in which it is the one."""
    server = S3Server(folder)
    try:
        server.start()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            with Storage(f"s3://{BUCKET}/first", Retry(20)) as first:  # makes the bucket, and the library's threads
                first.put("here", [b"1"])
            yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def storage(shared: S3Server, request: pytest.FixtureRequest) -> Iterator[Storage]:
    """A place of its own on the server that tests share."""
    with Storage(f"s3://{BUCKET}/{request.node.name}", IMPATIENT) as storage:
        yield storage


@pytest.fixture
def server(shared: S3Server, tmp_path: Path) -> Iterator[S3Server]:
    """A server to be hurt."""
    with running(tmp_path) as server:
        yield server


def test_files_are_put_read_listed_and_removed(storage: Storage) -> None:
    assert storage.sizes() == {}
    assert storage.folders() == []
    storage.put("checkpoint_1/a", [b"one", memoryview(b"two")])
    storage.put("checkpoint_1/deep/b", [b""])
    storage.put("checkpoint_10/c", [b"1"])
    assert storage.read("checkpoint_1/a") == b"onetwo"
    buffer = bytearray(6)
    storage.read_into("checkpoint_1/a", memoryview(buffer))
    assert buffer == b"onetwo"
    with pytest.raises(StorageError, match="has 6 bytes and should have 5"):
        storage.read_into("checkpoint_1/a", memoryview(bytearray(5)))
    assert storage.sizes("checkpoint_1") == {"checkpoint_1/a": 6, "checkpoint_1/deep/b": 0}
    assert sorted(storage.folders()) == ["checkpoint_1", "checkpoint_10"]
    storage.remove("checkpoint_1/a")
    storage.remove("checkpoint_1/a")
    with pytest.raises(StorageError, match="there is no such file") as found:
        storage.read("checkpoint_1/a")
    assert found.value.is_missing


def test_of_many_that_put_one_file_new_at_once_one_succeeds(storage: Storage) -> None:
    won: list[int] = []

    def put(number: int) -> None:
        with Storage(storage.url, IMPATIENT) as mine:
            if mine.put_new("manifest", str(number).encode()):
                won.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storage.read("manifest") == str(won[0]).encode()
    assert len(won) == 1


def test_a_file_written_piece_by_piece_is_there_at_the_end_or_not_at_all(storage: Storage) -> None:
    piece = bytes(range(256)) * (1 << 15)
    with storage.writer("large") as file:
        for _ in range(8):
            file.write(piece)
        assert storage.sizes() == {}
    assert storage.read("large") == piece * 8

    def break_off() -> None:
        with storage.writer("broken") as file:
            for _ in range(8):
                file.write(piece)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert list(storage.sizes()) == ["large"]


def test_a_checkpoint_goes_there_and_back_for_any_number_of_pservers(storage: Storage, tmp_path: Path) -> None:
    model = whole(OF, rows=3000)
    for serial in (1, 2):
        save(storage, OF, model, serial, places=2)
    manifest = good(storage, 2)
    assert bits(together(OF, [p for place in range(3) for p in pieces(storage, manifest, place, 3)])) == bits(model)
    assert locate(storage.url) == (storage.url, 2)
    export_model(storage, manifest, f"{storage.url}/model")
    export_model(storage, manifest, tmp_path / "model")
    with Storage(f"{storage.url}/model", NEVER) as saved:
        for path in saved.sizes():
            assert saved.read(path) == (tmp_path / "model" / path).read_bytes()
    storage.remove("checkpoint_2/manifest.json")
    assert choose(storage, "latest") == 1
    assert remove_interrupted(storage, before=3) == [2]
    remove(storage, 1)
    assert entries(storage) == []


def test_the_commands_take_its_urls(storage: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(storage, OF, whole(OF))
    assert _main(["checkpoints", "ls", storage.url]) == 0
    assert _main(["checkpoints", "verify", f"{storage.url}/checkpoint_1"]) == 0
    assert _main(["export", storage.url, str(tmp_path / "model")]) == 0
    assert _main(["reshard", storage.url, f"{storage.url}/other", "--pservers", "3"]) == 0
    assert "checkpoint 1: good" in capsys.readouterr().out
    assert _main(["checkpoints", "ls", f"s3://no-such-{BUCKET}/x"]) == 2


class Hurting:
    """Hurts the server at the n-th put: before it is sent, or once it is stored but nobody knows."""

    def __init__(self, storage: Storage, server: S3Server, hurt_at: int, is_done: bool) -> None:
        self._backend, self._server, self._hurt_at, self._is_done = storage._backend, server, hurt_at, is_done
        self._puts = 0
        self.failures = 0

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def put(self, path, parts) -> None:
        self._hurt(lambda: self._backend.put(path, parts))

    def put_new(self, path, data) -> bool:
        return self._hurt(lambda: self._backend.put_new(path, data))

    def _hurt(self, work):
        self._puts += 1
        if self._puts != self._hurt_at:
            return self._counted(work)
        if self._is_done:
            work()
        self._server.kill()
        if self._is_done:
            self.failures += 1
            raise ConnectionResetError("the server has gone before it answered")
        return self._counted(work)

    def _counted(self, work):
        try:
            return work()
        except Exception:
            self.failures += 1
            raise


@pytest.mark.parametrize(("hurt_at", "is_done"), [(3, False), (9, True)], ids=["before a put", "after the manifest's"])
def test_a_server_killed_and_started_again_during_a_save_costs_time_only(
    server: S3Server, hurt_at: int, is_done: bool
) -> None:
    storage = Storage(f"s3://{BUCKET}/hurt", Retry(20))
    model = whole(OF, rows=20_000)
    waits: list[float] = []
    restarted = threading.Event()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if not restarted.is_set():
            restarted.set()
            server.start()
        restarted.wait(min(seconds, 0.2))

    hurting = Hurting(storage, server, hurt_at, is_done)
    save(Storage(storage.url, Retry(20), wait, hurting), OF, model)
    assert restarted.is_set()
    assert hurting.failures == len(waits) > 0
    assert verify(storage, 1).rows == {"user": 20_000, OF.tables[1].name: 20_000}
    assert bits(together(OF, pieces(storage, good(storage, 1), 0, 1))) == bits(model)
    storage.close()


def test_a_job_goes_on_while_the_server_is_away_and_falls_back_to_what_it_holds(
    server: S3Server, tmp_path: Path, alone: Alone
) -> None:
    url = f"s3://{BUCKET}/job"
    args = ("--out", tmp_path / "model", "--pause", 0.05, "--every", 3)
    with Launched(tmp_path, TRAIN, *args, pservers=2, trainers=2, options=("--checkpoints", url)) as job:
        before = job.until(lambda s: s.checkpoints and s.checkpoints.made > 1 and is_inside(s), "checkpoints")
        server.kill()
        job.until(lambda s: s.version > before.version + 4, "training to go on without it")
        server.start()
        made = before.checkpoints.made
        after = job.until(lambda s: s.checkpoints and s.checkpoints.made > made + 1, "more checkpoints")
        job.hit("pserver-1")
        job.until(lambda s: s.generation > after.generation and s.version > 0, "the job to fall back")
        assert job.wait() == 0, job.text
    assert digests(tmp_path / "model") == alone(0)
    assert _main(["checkpoints", "verify", url]) == 0
    assert _main(["export", url, str(tmp_path / "exported")]) == 0
    assert digests(tmp_path / "exported") == alone(0)


def test_a_server_that_stays_away_ends_the_save_with_one_sentence(server: S3Server) -> None:
    server.kill()
    waits: list[float] = []
    with (
        Storage(f"s3://{BUCKET}/away", Retry(3), waits.append) as storage,
        pytest.raises(StorageError, match=r"cannot write s3://films/away/checkpoint_2/.*Could not connect"),
    ):
        save(storage, OF, whole(OF), serial=2)
    assert waits == [0.5, 1.0]


def test_wrong_keys_and_no_keys_are_told_as_such(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with Storage(storage.url) as wrong, pytest.raises(StorageError, match="check who may use it, and the keys"):
        wrong.put("a", [b"1"])
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with Storage(storage.url) as none, pytest.raises(StorageError, match="there are no keys; set AWS_ACCESS_KEY_ID"):
        none.put("a", [b"1"])


def test_a_place_that_holds_none_says_so(storage: Storage) -> None:
    with pytest.raises(ConfigError, match="it holds no checkpoints"):
        locate(storage.url)
    with pytest.raises(CheckpointError, match="cannot be used: the save was interrupted"):
        good(storage, 5)
