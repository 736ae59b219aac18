"""What a master shows of the job: its status, and who is waited for."""

from typing import NamedTuple

from evergrad.master.failures import Failures
from evergrad.master.members import Members
from evergrad.master.pace import Behind
from evergrad.master.progress import Progress as Shown
from evergrad.master.recovery import Recovery
from evergrad.master.script import SLOW_S
from evergrad.master.settings import Settings
from evergrad.messages import Member, Place, Request, Role, Status, Term

SILENT_S = 2.0
"""A pserver not heard of for longer is shown as waited for."""


class Overview(NamedTuple):
    """Reads the parts of a master.

    `paused` are those who wait for a slower trainer, with the time since when; `waiting` those whose ask waits;
    `is_over` and `has_ended`: the job is over, and the record says so.
    """

    settings: Settings
    term: Term
    recovery: Recovery
    members: Members
    failures: Failures
    shown: Shown
    finished: set[Member]
    paused: dict[Member, float]
    waiting: set[Member]
    is_over: bool
    has_ended: bool
    failure: str | None

    def status(self, request: Request, counters: dict[str, int], now_s: float) -> Status:
        """How the job goes."""
        script = self.recovery.script
        training = script.training if script is not None else None
        epoch = training.epoch if training is not None else None
        return Status(
            request=request,
            job=self.settings.job,
            phase=self._phase(),
            waiting_for=self.waiting_for(now_s),
            epoch=training.number if training is not None else -1,
            epochs=script.epochs if script is not None else 0,
            step=epoch.step if epoch is not None else 0,
            steps=epoch.steps if epoch is not None else 0,
            version=training.version if training is not None else 0,
            samples=self.shown.samples,
            samples_per_s=self.shown.samples_per_s(now_s),
            live=self.shown.live(),
            reported=self.shown.reported,
            members=self.members.status(now_s, self._doing),
            counters=counters,
            notes=tuple(self.shown.notes),
            ended=self.has_ended,
            failure=self.failure,
            dropped=self.shown.dropped,
            set_aside=tuple(self.failures.set_aside),
            checkpoints=self.recovery.checkpoints.status(now_s),
            term=self.term,
            generation=self.recovery.generations.number,
        )

    def _phase(self) -> str:
        script = self.recovery.script
        if self.is_over:
            return "ended"
        if self.recovery.schema is None:
            return "forming"
        if not (self.recovery.are_restored and self.recovery.is_whole):
            return "restoring"
        return script.phase() if script is not None else "restoring"

    def waiting_for(self, now_s: float) -> str:
        """Who is waited for and why, or nothing."""
        if self.is_over:
            return "" if self.has_ended else "the record to be written"
        recovery, places = self.recovery, self.settings.places
        missing = [str(p) for p in range(places) if Place(p) not in self.members.pservers()]
        if missing:
            return f"pserver {', '.join(missing)} of {places} to join"
        if greeted := recovery.generations.waits_for():
            return f"pserver {greeted[0]} to say where it stands"
        if not self.members.trainers():
            return "a trainer to join"
        if not (recovery.is_recorded and recovery.is_loss_recorded):
            return "the record to be written"
        if recovery.script is not None and recovery.found is None:
            return "the checkpoints to be looked through"
        silent = [place for place, p in sorted(self.members.pservers().items()) if now_s - p.seen_s > SILENT_S]
        if silent:
            return f"pserver {silent[0]}, which is silent"
        if recovery.is_storage_away:
            return "the storage of checkpoints, which cannot be read"
        pservers = recovery.generations.pservers
        if pservers is not None and (told := pservers.waits_for(now_s - SLOW_S)):
            return f"pserver {told[0]} to acknowledge what it was told"
        return self._slow_trainer(now_s) or self._gate() or self._idle_script(now_s)

    def _slow_trainer(self, now_s: float) -> str:
        paused = [member for member, since_s in self.paused.items() if now_s - since_s > SLOW_S]
        if paused and (behind := self._behind(paused[0])) is not None:
            behind_whom = self._name(paused[0])
            return f"{self._name(behind.member)}, {behind.batches} batches behind {behind_whom} (max_staleness)"
        script = self.recovery.script
        slow = script.slow_task(now_s) if script is not None else None
        if slow is None:
            return ""
        what, member, seconds = slow
        has_begun = script is not None and script.training.number >= 0
        return f"{what} at {self._name(member)} for {seconds:.0f} s" if has_begun else f"{what} at {self._name(member)}"

    def _idle_script(self, now_s: float) -> str:
        """The trainer that has longest been left to its script, which asks for nothing."""
        left = [t for t in self.members.trainers() if t.member not in self.waiting and t.answered_s < now_s - SLOW_S]
        return f"{min(left, key=lambda t: t.answered_s).name} to go on in its script" if left else ""

    def _gate(self) -> str:
        """The checkpoint without which nothing goes on."""
        script, recovery = self.recovery.script, self.recovery
        may_go_on = recovery.checkpoints.may_end if self.finished else recovery.checkpoints.may_pass
        if script is None or not script.is_idle or recovery.is_now(may_go_on):
            return ""
        return recovery.checkpoints.waits_for(recovery.generations.at)

    def _behind(self, member: Member) -> Behind | None:
        """Whom a trainer waits for under bounded staleness."""
        script = self.recovery.script
        return script.behind(member) if script is not None and member in self.paused else None

    def _name(self, member: Member) -> str:
        return self.members[member].name if member in self.members else "nobody"

    def _doing(self, member: Member) -> str:
        if member in self.finished:
            return "finished"
        if (behind := self._behind(member)) is not None:
            return f"waits for {self._name(behind.member)}, {behind.batches} batches behind"
        script, state = self.recovery.script, self.members[member]
        doing = script.doing.get(member, "") if script is not None else ""
        if state.idle_s < SLOW_S:
            return doing
        stands = f"{'in its script' if state.role is Role.TRAINER else 'at one thing'} for {state.idle_s:.0f} s"
        return f"{doing}, {stands}" if doing else stands
