"""How the job goes on through failures: which generation there is, its checkpoints, and the record.

First start, resume, a lost pserver and a checkpoint that cannot be read are one thing: when there is a pserver at each
place and they are not those of the present generation, a new generation begins with the newest checkpoint.
"""

from collections.abc import Callable

import msgspec

from evergrad.checkpoint.manifest import Metrics
from evergrad.master.checkpoints import SERIALS, Checkpoints
from evergrad.master.dispatch import AttemptNumbers
from evergrad.master.errands import (
    Errand,
    Held,
    Hold,
    Look,
    ManifestPut,
    MetricsPut,
    Prune,
    Pruned,
    PutManifest,
    PutMetrics,
    RecordPut,
    Result,
)
from evergrad.master.failures import Failures
from evergrad.master.generations import Generations
from evergrad.master.members import Members
from evergrad.master.phases import Phases
from evergrad.master.progress import Progress as Shown
from evergrad.master.record import Found, Record
from evergrad.master.recording import Facts, Recording
from evergrad.master.schema import refuse_checkpoint
from evergrad.master.script import Script
from evergrad.master.settings import Settings
from evergrad.messages import (
    Abandoned,
    Agree,
    CheckpointSpec,
    CloseEpoch,
    Commit,
    Committed,
    EpochClosed,
    Frozen,
    Generation,
    Marked,
    Message,
    Missing,
    Obstacle,
    Progress,
    PserverAt,
    Restored,
    Schema,
    Send,
    Source,
    Term,
    Written,
)

OfGeneration = Restored | Committed | EpochClosed | Missing
AGAIN_S = 5.0
"""Storage that could not be read is tried again after this long, and after as long as pservers have tried it."""

OfCut = Frozen | Marked | Written | Abandoned


class Recovery:
    """The lasting part of a master.

    Args:
        settings: how the master was started.
        term: its term.
        members: who is there.
        failures: which tasks were set aside.
        shown: what people are told.
        end: ends the job, with a failure.

    Invariants:
    1. What follows from a change of the record is not said before it is written (`is_recorded`).
    2. `script` and `schema` are set together, once.
    """

    def __init__(
        self,
        settings: Settings,
        term: Term,
        members: Members,
        failures: Failures,
        shown: Shown,
        end: Callable[[str | None], None],
    ) -> None:
        self.schema: Schema | None = None
        self.script: Script | None = None
        self.generations = Generations(term)
        self.checkpoints = Checkpoints(None, is_sync=True)
        self.found: Found | None = None
        self.fell_behind = Generation(0)
        """The last generation that began behind where scripts were: older scripts are to start again."""
        self._settings, self._term = settings, term
        self._members, self._failures, self._shown, self._end = members, failures, shown, end
        self._numbers = AttemptNumbers(term)
        self._recording = Recording(settings.keeps_record)
        self._next_serial = 0
        self._reserving: range | None = None
        self._ended: tuple[bool, str | None] = False, None
        self._errands: list[Errand] = []
        self._unrated: dict[int, None] = {}
        self._rating: int | None = None
        self._must_prune = False
        self._phases = Phases()
        self._has_taken_over = False
        self._again_s: float | None = None
        """When the checkpoint that could not be read is tried again."""

    # -- the beginning -------------------------------------------------------------------------------------------------

    def settle(self, agree: Agree) -> None:
        """The first trainer's model is the job's; look what there is to begin with."""
        self.schema, spec, settings = agree.schema, agree.checkpoints, self._settings
        url = settings.url or (spec.url if spec is not None else None)
        if (where := url or settings.scratch) is not None:
            spec = CheckpointSpec(where) if spec is None else msgspec.structs.replace(spec, url=where)
            self.checkpoints = Checkpoints(spec, agree.schema.update.is_sync)
        self.script = Script(agree.schema.update, self._numbers, self.checkpoints.may_pass)
        if url is None and agree.warm_start is None and settings.resume in ("auto", "never"):
            self.found = Found()
            return
        self._hold()
        self._errands.append(Look(url, settings.resume, agree.warm_start))

    def _hold(self) -> None:
        """Keep other jobs away from where checkpoints go; to the scratch folder none come."""
        spec = self.checkpoints.spec
        if spec is not None and spec.url != self._settings.scratch:
            self._errands.append(Hold(spec.url, self._settings.job))

    def refuse_found(self) -> str | None:
        """Why the job cannot begin with what was found; None if it can, or nothing was."""
        found = self.found
        if found is None or found.failure is not None:
            return found.failure if found is not None else None
        if found.schema is None or found.source is None or self.schema is None:
            return None
        name = f"{found.source.url}/checkpoint_{found.source.serial}"
        return refuse_checkpoint(found.schema, self.schema, name, found.source.warm)

    # -- generations ---------------------------------------------------------------------------------------------------

    @property
    def are_restored(self) -> bool:
        """Whether the pservers hold the present generation."""
        return self.generations.are_restored

    @property
    def is_storage_away(self) -> bool:
        """Whether the generation waits for its checkpoint to be readable."""
        return self._again_s is not None

    @property
    def is_whole(self) -> bool:
        """Whether the pservers of the present generation are all there; before the first there are none."""
        return self._members.present() == self.generations.at

    @property
    def are_behind(self) -> bool:
        """Whether a pserver has so much to acknowledge that no batch is handed out."""
        return self.generations.pservers is not None and self.generations.pservers.are_behind

    @property
    def is_applied(self) -> bool:
        """Whether the pservers have all steps that are decided (in `Async` always), so that none can be lost."""
        is_sync, pservers = self.schema is not None and self.schema.update.is_sync, self.generations.pservers
        return not is_sync or (pservers is not None and pservers.have_acknowledged)

    def form(self, present: tuple[PserverAt, ...], now_s: float) -> None:
        """Begin, start or take over a generation when its time has come."""
        generations = self.generations
        if self._has_taken_over:
            self._has_taken_over = False
            self._phases.begin("this master began", now_s)
        if self.script is None or self.schema is None or self.found is None:
            return
        if len(present) < self._settings.places or self.refuse_found() is not None:
            return
        is_again = self._again_s is not None and now_s >= self._again_s
        if present != generations.at or is_again:
            self._begin(present, now_s)
        elif (standings := generations.found()) is not None:
            if standings.is_whole(generations.number):
                epoch, is_sync = self.script.begun.epoch, self.schema.update.is_sync
                is_over = not is_sync and standings.is_past(epoch)
                self.script.resume(standings.version, standings.standing(epoch), is_over)
                last = standings.last_commit if is_sync else None
                generations.go_on(self.schema, standings, last)
                self._phases.ended("until all pservers had said where they stand", now_s)
                self._shown.note_event(f"a new master goes on in term {self._term}, without falling back")
            else:
                self._begin(present, now_s)
        if generations.is_to_start and self.is_recorded:
            spec = self.checkpoints.spec
            generations.start(self.schema, spec.url if spec is not None else None)

    def _begin(self, present: tuple[PserverAt, ...], now_s: float) -> None:
        """A generation begins with the newest checkpoint there is, else with what the job began with."""
        assert self.script is not None
        self._again_s = None
        self._phases.ended("until all pservers were there", now_s)
        assert self.found is not None
        spec, durable = self.checkpoints.spec, self.checkpoints.durable
        source, progress = self.found.source, self.found.progress if self.found.source is not None else None
        if durable and spec is not None:
            source, progress = Source(spec.url, durable[-1].serial), durable[-1].progress
        is_behind = self.generations.at and not _reaches(progress, self.script.passed, self.script.begun.epoch >= 0)
        self.generations.begin(present, source)
        if is_behind:
            self.fell_behind = self.generations.number
            self.script.go_back(progress)
            self._shown.note_event("the job falls back behind where scripts are: they are started again", True)
        self.checkpoints.fall_back()
        self.script.restore(progress)
        lost = progress or Progress()
        self._failures.set_aside, self._shown.dropped = list(lost.set_aside), lost.dropped

    def lost(self, name: str, reason: str, now_s: float) -> None:
        """A pserver is gone."""
        if not self.generations.at:
            return
        self._phases.begin(f"{name} was lost", now_s)
        if self.checkpoints.spec is None:
            self._end(
                f"{name} is lost ({reason}) and its parameters with it, and there are no checkpoints to fall back to;"
                " start the job with --checkpoints"
            )

    def from_pserver(self, message: OfGeneration, now_s: float) -> None:
        """A pserver has acknowledged something, or cannot do it."""
        pservers = self.generations.pservers
        if pservers is None or message.generation != self.generations.number:
            return
        match message:
            case Restored(failure=str(failure)):
                self._cannot_restore(failure, message.obstacle, now_s)
            case Restored():
                had = pservers.are_restored
                pservers.restored(message)
                if pservers.are_restored and not had:
                    self._note_restored(now_s)
            case Committed():
                pservers.committed(message)
                if pservers.have_acknowledged:
                    self._note_recovered("to the first step", now_s)
            case EpochClosed():
                pservers.closed(message)
                if self.script is not None and pservers.have_acknowledged:
                    self.script.training.settle()
            case Missing():
                self._lacks(message, now_s)

    def _lacks(self, missing: Missing, now_s: float) -> None:
        """What cannot be: nothing is applied of the step, and the job falls back."""
        what = f"pserver {missing.place} lacks a push that step {missing.step} names; please report this bug"
        if self.checkpoints.spec is None:
            self._end(what)
            return
        self._phases.begin("that", now_s)
        self._shown.note_event(what, is_trouble=True)
        self._begin(self.generations.at, now_s)

    def _cannot_restore(self, failure: str, obstacle: Obstacle, now_s: float) -> None:
        """A damaged checkpoint is given up for the one before it; for storage that is away the job waits."""
        if self.is_storage_away:
            return
        if obstacle is Obstacle.AWAY:
            self._again_s = now_s + AGAIN_S
            self._shown.note_event(f"{failure}: it is tried again in {AGAIN_S:g} s", is_trouble=True)
            return
        source, durable = self.generations.source, self.checkpoints.durable
        is_own = source is not None and any(d.serial == source.serial for d in durable)
        self._shown.note_event(f"a checkpoint could not be restored: {failure}", is_trouble=True)
        if source is None or not is_own or len(durable) == 1 or obstacle is Obstacle.HERE:
            self._end(f"the checkpoint to begin with cannot be restored: {failure}")
            return
        self.checkpoints.forget(source.serial)
        self._begin(self.generations.at, now_s)

    def _note_restored(self, now_s: float) -> None:
        source, pservers = self.generations.source, self.generations.pservers
        self._phases.ended("to load", now_s)
        if source is None or pservers is None:
            return
        loaded = list(pservers.loaded.values())
        rows, size = sum(sum(r.rows) for r in loaded), sum(r.bytes_read for r in loaded)
        self._shown.note_event(
            f"generation {self.generations.number} begins with checkpoint {source.serial}: {rows:,} rows,"
            f" {size / 1e6:,.1f} MB, loaded in {max(r.seconds for r in loaded):.1f} s"
        )

    def note_work(self, now_s: float) -> None:
        """A task was done that no commit follows from: the job is at work again, if it was not."""
        self._note_recovered("to the first task", now_s)

    def _note_recovered(self, phase: str, now_s: float) -> None:
        if not self._phases.is_open or not self.are_restored or not self.is_whole:
            return
        self._phases.ended(phase, now_s)
        self._shown.note_event(f"the job has recovered {self._phases.close(now_s)}")

    def commit(self, step: int, chosen: tuple[tuple[int, object], ...], now_s: float) -> None:
        """Tell the pservers; a checkpoint that is due rides in the commit."""
        pservers, script = self.generations.pservers, self.script
        assert pservers is not None
        assert script is not None
        serial, progress = None, self._progress()
        if progress is not None and self.checkpoints.wants(progress, script.steps, script.is_idle, False, now_s):
            serial = self.checkpoints.begin(progress, script.calls_done(), script.steps, script.is_idle, now_s)
        pservers.tell(Commit(self._term, self.generations.number, step, chosen, serial))  # type: ignore[arg-type]

    def _progress(self) -> Progress | None:
        """How far training is, and what the model lacks by now."""
        progress = self.script.progress() if self.script is not None else None
        if progress is None:
            return None
        lost = tuple(self._failures.set_aside)
        return msgspec.structs.replace(progress, set_aside=lost, dropped=self._shown.dropped)

    def close_epoch(self, epoch: int) -> None:
        """Tell the pservers that an asynchronous epoch is over."""
        assert self.generations.pservers is not None
        self.generations.pservers.tell(CloseEpoch(self._term, self.generations.number, epoch))

    def due(self, now_s: float) -> list[Send]:
        """What the pservers are told now, again and again until they acknowledge it."""
        generations = self.generations
        sends = generations.greet(now_s)
        if generations.pservers is not None and self.is_loss_recorded:  # or the next master would not tell of it
            sends += generations.pservers.due(now_s)
            if generations.are_restored:
                sends += self.checkpoints.due(self._term, generations.number, generations.at, now_s)
        return sends

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def heard_of_cut(self, message: OfCut, now_s: float) -> Message | None:
        """A pserver has said something of a cut; returns what it is answered."""
        if message.generation != self.generations.number:
            return None
        return self.checkpoints.heard(message, self._term, self._settings.places, now_s)

    def cut(self, is_stopping: bool, is_last: bool, now_s: float) -> None:
        """Begin the cuts that no commit carries, and finish those that are written.

        Args:
            is_stopping: nothing is handed out any more.
            is_last: the end of the job waits for a checkpoint.
            now_s: the time.
        """
        checkpoints, script, generations = self.checkpoints, self.script, self.generations
        for event in checkpoints.take_events():
            self._shown.log_event(*event)
        if script is None or generations.pservers is None or not generations.are_restored:
            return
        progress = self._progress()
        is_still = script.is_idle or is_stopping
        is_moment = is_still or not checkpoints.is_sync
        may_mark = is_moment and not script.is_settling and generations.pservers.have_acknowledged
        if progress is not None and may_mark and checkpoints.wants(progress, script.steps, is_still, is_last, now_s):
            checkpoints.begin(progress, script.calls_done(), script.steps, script.is_idle, now_s)
        complete = checkpoints.take_complete(self._settings.places)
        if complete is not None and checkpoints.spec is not None and self.schema is not None and self.found is not None:
            job = self._settings.job
            self._errands.append(
                PutManifest(
                    checkpoints.spec.url, job, self.found.lineage or job, self.schema, self._settings.places,
                    generations.number, complete, self._shown.reported_so_far(),
                )
            )  # fmt: skip
        self._put_metrics()

    def rate(self, epoch: int, best: float | None) -> None:
        """The script has reported metrics for an epoch, of which `best=` makes this."""
        self._unrated |= dict.fromkeys(self.checkpoints.rate(epoch, best))

    def _put_metrics(self) -> None:
        """Have what was reported of a checkpoint written beside it, one after the other."""
        spec = self.checkpoints.spec
        while self._unrated and self._rating is None and spec is not None:
            serial = next(iter(self._unrated))
            del self._unrated[serial]
            durable = next((d for d in self.checkpoints.durable if d.serial == serial), None)
            if durable is not None:  # or it was removed meanwhile
                self._rating = serial
                self._errands.append(PutMetrics(spec.url, serial, Metrics(self._shown.reported_so_far(), durable.best)))

    def is_now(self, holds: Callable[[Progress], bool]) -> bool:
        """Whether this holds where training is now; before the initial values there is nothing to lose."""
        progress = self.script.progress() if self.script is not None else None
        return progress is None or holds(progress)

    def _prune(self) -> None:
        """Remove what is kept no longer."""
        checkpoints = self.checkpoints
        if checkpoints.spec is None:
            return
        keep = checkpoints.to_keep()
        remove = tuple(d.serial for d in checkpoints.durable if d.serial not in keep)
        for serial in remove:
            checkpoints.forget(serial)
        remove += tuple(sorted(checkpoints.strays))
        checkpoints.strays.clear()
        self._errands.append(Prune(checkpoints.spec.url, remove, before=max(keep, default=0)))

    # -- errands and the record ----------------------------------------------------------------------------------------

    def take_errands(self) -> list[Errand]:
        """What the process is to do now."""
        errands, self._errands = self._errands, []
        return errands

    def done(self, result: Result, now_s: float) -> None:
        """An errand is done."""
        match result:
            case Held(failure=str(failure)):
                if self.found is None:
                    self.found = Found(failure=failure)
                elif result.is_other:
                    self._end(failure)
            case Found() if self.found is None:
                self._take(result)
            case ManifestPut():
                self._must_prune |= self.checkpoints.put(result.serial, result.failure, now_s)
            case RecordPut():
                self._recording.put(result.number)
            case MetricsPut():
                self._rating = None
                if result.failure is not None:
                    what = f"the metrics of checkpoint {result.serial} could not be written: {result.failure}"
                    self._shown.note_event(what, is_trouble=True)
                self._must_prune = True
            case Pruned(failure=str(failure)):
                self._shown.note_event(f"old checkpoints could not be removed: {failure}", is_trouble=True)

    def _take(self, found: Found) -> None:
        """What there is to begin with."""
        assert self.script is not None  # it was looked for when the script became known
        self.script.take_calls(found.evaluations, found.savings)
        self._shown.reported = dict(found.reported)
        for problem in found.damaged:
            self._shown.note_event(f"passed over {problem}", is_trouble=True)
        self.checkpoints.durable = list(found.durable)
        self._next_serial = max(self._next_serial, found.next_serial)
        self.found = msgspec.structs.replace(found, evaluations=(), savings=(), reported={}, damaged=())

    @property
    def is_recorded(self) -> bool:
        """Whether what answers follow from is written."""
        return self._recording.has_awaited(self._facts())

    @property
    def is_loss_recorded(self) -> bool:
        """Whether what the model lacks is written."""
        return self._recording.has_lost(self._facts())

    @property
    def is_all_recorded(self) -> bool:
        """Whether the rest is written too."""
        return self._recording.has(self._facts())

    def ended(self, failure: str | None) -> None:
        """The job is over."""
        self._ended = True, failure

    def record(self) -> None:
        """Have the record written if it has changed; serials are used when it says that they are taken."""
        if self.checkpoints.needs_serials and self.found is not None and self._reserving is None:
            self._reserving = range(self._next_serial, self._next_serial + SERIALS)
            self._next_serial += SERIALS
        errand = self._recording.write(self._facts(), self._make_record)
        if errand is not None:
            self._errands.append(errand)
        if self._reserving is not None and self.is_all_recorded:
            self.checkpoints.serials, self._reserving = self._reserving, None
        if self._must_prune and self.is_all_recorded:  # the next master would look for what is gone
            self._must_prune = False
            self._prune()

    def _facts(self) -> Facts:
        """What the record says, in short."""
        checkpoints, script, generations = self.checkpoints, self.script, self.generations
        of_script = script.facts() if script is not None else None
        durable = tuple((d.serial, d.best) for d in checkpoints.durable)
        return Facts(
            awaited=(self._term, generations.number, generations.at, of_script, self._ended),
            lost=(tuple(self._failures.set_aside), self._shown.dropped),
            others=(self._next_serial, durable, checkpoints.putting, self._shown.reports),
        )

    def _make_record(self) -> Record:
        generations, script = self.generations, self.script
        evaluations, savings = script.calls_done() if script is not None else ((), ())
        is_over, failure = self._ended
        return Record(
            job=self._settings.job,
            term=self._term,
            generation=generations.number,
            schema=self.schema if self.found is not None else None,  # else the next master is told again, and looks
            spec=self.checkpoints.spec,
            found=self.found,
            source=generations.source,
            fell_behind=self.fell_behind,
            pservers=generations.at,
            names=tuple(self._members.name_of(p.member) for p in generations.at),
            next_serial=self._next_serial,
            durable=tuple(self.checkpoints.durable),
            putting=self.checkpoints.putting,
            progress=script.begun if script is not None else Progress(),
            passed=script.passed if script is not None else -1,
            epochs=script.epochs if script is not None else 0,
            outside=script.outside() if script is not None else (),
            evaluations=evaluations,
            savings=savings,
            set_aside=tuple(self._failures.set_aside),
            dropped=self._shown.dropped,
            reported=self._shown.reported_so_far(),
            ended=is_over,
            failure=failure,
        )

    def adopt(self, record: Record) -> None:
        """Take over from the master before."""
        self._has_taken_over = True
        self.schema, self.found, self._next_serial = record.schema, record.found, record.next_serial
        self._shown.reported, self._shown.dropped = dict(record.reported), record.dropped
        self._failures.set_aside = list(record.set_aside)
        if record.schema is None:
            return
        self.checkpoints = Checkpoints(record.spec, record.schema.update.is_sync, record.durable)
        self.checkpoints.strays = {record.putting} if record.putting is not None else set()
        self.script = Script(record.schema.update, self._numbers, self.checkpoints.may_pass)
        self.script.adopt(record)
        self.generations.adopt(record)
        self.fell_behind = record.fell_behind
        self._hold()
        self._unrated = {d.serial: None for d in record.durable if d.best is not None}  # it may not be written
        for p, (name, pid) in zip(record.pservers, record.names, strict=True):
            self._members.add_unheard(p, name, pid)


def _reaches(progress: Progress | None, passed: int, is_begun: bool) -> bool:
    """Whether scripts that are past this epoch's batches, or have only begun, need not go back."""
    if progress is None:
        return not is_begun  # the initial values are those of models that have not been trained
    return passed < 0 or (progress.epoch, progress.is_closed) >= (passed, True)
