"""What people see of a status."""

import io

import msgspec
from rich.console import Console

from evergrad.launch import view
from evergrad.messages import CheckpointStatus, MemberStatus, Request, Role, SetAside, Status

TRAINER = MemberStatus("trainer-0", Role.TRAINER, 41, 0.2, "step 7 [task 1]")
PSERVER = MemberStatus("pserver-0", Role.PSERVER, 42, 0.1, "version 7")
STATUS = Status(
    request=Request(1),
    job="films",
    phase="training",
    waiting_for="",
    epoch=0,
    epochs=3,
    step=7,
    steps=20,
    version=7,
    samples=14336,
    samples_per_s=51234.5,
    live={"loss": 0.6931},
    reported={},
    members=(TRAINER, PSERVER),
    counters={"repeated": 2, "refused": 0},
    notes=(),
    ended=False,
    failure=None,
)


def but(**changes: object) -> Status:
    return msgspec.structs.replace(STATUS, **changes)


def ending(status: int, failure: str | None = None, restarts: dict[str, int] | None = None) -> view.Ending:
    return view.Ending(exit_status=status, wall_s=2.0, restarts=restarts or {}, failure=failure, folder="logs/films")


def test_a_progress_line_has_epoch_step_rate_and_loss() -> None:
    line = view.progress_line(STATUS)
    assert line == "epoch 0 (of 3)  step 7/20  51,234 samples/s  loss 0.6931  1 trainers"


def test_before_the_first_epoch_the_line_says_who_is_waited_for() -> None:
    assert (
        view.progress_line(but(epoch=-1, phase="starting", waiting_for="pserver 1"))
        == "starting: waiting for pserver 1"
    )


def test_a_process_that_comes_and_one_that_goes_are_each_said_once() -> None:
    later = but(members=(PSERVER, msgspec.structs.replace(TRAINER, pid=77)))
    assert view.changes(STATUS, later) == ["trainer-0 (pid 41) is gone", "trainer-0 (pid 77) has joined"]
    assert view.changes(later, later) == []


def test_an_epoch_and_its_report_are_said_when_they_come() -> None:
    later = but(epoch=1, steps=20, reported={0: {"auc": 0.77}})
    assert view.changes(STATUS, later) == ["epoch 0: auc 0.7700", "epoch 1 (of 3) begins: 20 steps"]


def test_an_epoch_that_a_job_goes_on_with_begins_though_nobody_knows_yet_how_many_there_are() -> None:
    assert view.changes(but(epoch=-1), but(epoch=4, epochs=0)) == ["epoch 4 begins: 20 steps"]


def test_checkpoints_and_why_they_fail_are_said_on_the_screen_and_in_the_summary() -> None:
    good = CheckpointStatus("/c", 4, "epoch 1, its end", 12.3, 5, 0, None)
    line = "checkpoints: 4 is the newest (epoch 1, its end, 12 s ago), 5 made, in /c"
    assert line in view.summary(but(checkpoints=good), ending(0))
    failing = msgspec.structs.replace(good, age_s=None, failed=2, failure="the disk is full\n")
    out = io.StringIO()
    Console(file=out, width=200, markup=False).print(view.screen(but(checkpoints=failing), {}))
    wanted = "checkpoints: 4 is the newest (epoch 1, its end), 5 made, 2 failed, in /c; the last one failed: the disk"
    assert wanted in out.getvalue()
    none = CheckpointStatus("/c", None, "", None, 0, 0, None)
    assert "checkpoints: none yet, 0 made, in /c" in view.summary(but(checkpoints=none), ending(0))


def test_a_failing_checkpoint_is_said_once_for_each_reason() -> None:
    full = but(checkpoints=CheckpointStatus("/c", None, "", None, 0, 1, "the disk is full"))
    said = "a checkpoint has failed: the disk is full; training goes on, and the next one is tried"
    assert view.changes(STATUS, full) == [said]
    assert view.changes(full, msgspec.structs.replace(full, samples=9)) == []
    gone = but(checkpoints=CheckpointStatus("/c", None, "", None, 0, 3, "it is away"))
    assert view.changes(full, gone) == [said.replace("the disk is full", "it is away")]


def test_who_the_start_waits_for_is_said_when_it_changes() -> None:
    forming = but(epoch=-1, waiting_for="pserver 0 to join")
    assert view.changes(forming, but(epoch=-1, waiting_for="a trainer")) == ["waiting for a trainer"]
    assert view.changes(STATUS, but(waiting_for="task 0 at trainer-0")) == []


def test_who_is_waited_for_is_said_once_the_job_stands_still() -> None:
    stall = view.Stall()
    assert [stall.seen(STATUS, now_s) for now_s in (0.0, 1.9, 2.0)] == [False, False, True]
    assert not stall.seen(but(version=8), 2.5)
    waiting = but(waiting_for="task 0 at trainer-0")
    assert "waiting" not in view.progress_line(waiting)
    assert "waiting for task 0 at trainer-0" in view.progress_line(waiting, is_stalled=True)


def test_that_all_leave_at_the_end_is_not_said() -> None:
    assert view.changes(STATUS, but(ended=True, members=())) == []


def test_the_first_status_introduces_everybody() -> None:
    lines = view.changes(None, STATUS)
    assert lines[:2] == ["pserver-0 (pid 42) has joined", "trainer-0 (pid 41) has joined"]


def test_the_screen_names_members_and_leaves_brackets_alone() -> None:
    out = io.StringIO()
    Console(file=out, width=100, markup=False).print(view.screen(but(reported={0: {"auc": 0.5}}), {"trainer-0": 3}))
    text = out.getvalue()
    assert "step 7 [task 1]" in text
    assert "auc 0.5000" in text
    assert [line.split()[4] for line in text.splitlines() if line.startswith("trainer-0")] == ["3"]


def test_the_summary_counts_and_gives_the_failure_once() -> None:
    status = but(
        version=21, failure="ValueError: no such column", ended=True, notes=("same bits withdrawn: drop_after",)
    )
    lines = view.summary(status, ending(1, status.failure, {"trainer-1": 2}))
    assert lines[0] == "The job failed."
    assert "0 of 3 epochs, 21 steps, 14,336 samples in 2.0 s (7,168 samples/s)" in lines
    assert "counted: repeated 2" in lines
    assert "restarts: trainer-1 2x" in lines
    assert "note: same bits withdrawn: drop_after" in lines
    assert sum("no such column" in line for line in lines) == 1


def test_a_job_that_ended_well_has_done_all_its_epochs() -> None:
    lines = view.summary(but(ended=True, epoch=2, step=40, steps=40), ending(0))
    assert lines[0] == "The job ended well."
    assert lines[1].startswith("3 of 3 epochs")


def test_an_epoch_that_was_left_in_the_middle_is_not_counted() -> None:
    assert view.summary(but(ended=True, epoch=2, step=7, steps=40), ending(0))[1].startswith("2 of 3 epochs")


def test_a_metric_that_is_no_number_is_reported_once() -> None:
    first = but(reported={0: {"auc": float("nan")}})
    again = but(reported={0: {"auc": float("nan")}})
    assert view._reports(None, first) == ["epoch 0: auc nan"]
    assert view._reports(first, again) == []


def test_a_job_that_never_answered_still_has_a_summary() -> None:
    assert view.summary(None, ending(1, "the master was killed")) == [
        "The job failed.",
        "logs: logs/films",
        "",
        "the master was killed",
    ]


def test_samples_that_were_not_trained_are_said_on_the_screen_and_in_the_summary() -> None:
    aside = (SetAside("epoch 0, step 3, task 1", 1024, "ValueError: bad [row]\n"),)
    status = but(dropped=2048, set_aside=aside, failure="the script raised in 1 task", ended=True)
    lines = view.summary(status, ending(1, status.failure))
    assert "dropped: 2,048 samples that came too late for their step, so not the same bits" in lines
    assert "set aside: epoch 0, step 3, task 1 (1,024 samples): ValueError: bad [row]?" in lines
    out = io.StringIO()
    Console(file=out, width=120, markup=False).print(view.screen(status, {}))
    assert "dropped: 2,048 samples" in out.getvalue()
    assert "set aside: epoch 0, step 3, task 1" in out.getvalue()
    assert not any("dropped" in line or "aside" in line for line in view.summary(STATUS, ending(0)))
