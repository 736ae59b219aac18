"""Roles that lack one rule of the protocol; `mutations.py` says which rule that is."""

import msgspec

from evergrad.master.calls import _added_up
from evergrad.master.dispatch import TaskPool, _Pending
from evergrad.master.master import Master
from evergrad.master.pservers import Pservers
from evergrad.master.script import Script
from evergrad.master.training import SyncEpoch
from evergrad.messages import INIT_STEP, NEWEST, BreakDone, Commit, EpochClosed, Pushed, Send, SyncTask
from evergrad.metrics import partial, result
from evergrad.pserver.batches import Standpoint
from evergrad.pserver.parts import Parts
from evergrad.pserver.pserver import Pserver
from evergrad.schedule import sync_task
from evergrad.trainer.trainer import PushRefused, Trainer

# -- pservers ----------------------------------------------------------------------------------------------------------


class AppliesAtAnyVersion(Pserver):
    def _commit(self, src, message):
        if self._held is not None and self._version != INIT_STEP:
            self._version = message.step
        return super()._commit(src, message)


class AppliesTwice(Pserver):
    def _commit(self, src, message):
        if 0 <= message.step < self._version:
            message = msgspec.structs.replace(message, step=self._version, chosen=())
        return super()._commit(src, message)


class StagesByTaskAlone(Pserver):
    def _push(self, push, model, admission):
        answer = super()._push(push, model, admission)
        for key in [key for key in self._staged if key[0] == push.task and key[1] != push.attempt]:
            self._promised_bytes -= model.bytes_needed(self._staged.pop(key).tables)
        return answer


class StagesForAnyStep(Pserver):
    def _push(self, push, model, admission):
        step = max(push.step, self._version) if push.step >= 0 else push.step
        return super()._push(msgspec.structs.replace(push, step=step), model, admission)


class AnswersPullsAtOnce(Pserver):
    def _pull(self, src, pull, model, admission):
        return super()._pull(src, msgspec.structs.replace(pull, version=NEWEST), model, admission)


class MakesRowsOnPulls(Pserver):
    def _pull(self, src, pull, model, admission):
        answer = super()._pull(src, pull, model, admission)
        if self._has(pull.version):
            for asked in pull.tables:
                model._tables[asked.table]._rows_of(asked.keys)
        return answer


class AppliesAllItHolds(Pserver):
    def _apply(self, model, commit, pushes):
        super()._apply(model, commit, list(self._staged.values()) if pushes and commit.step >= 0 else pushes)


class AppliesTheFirstPush(Pserver):
    def _apply(self, model, commit, pushes):
        super()._apply(model, commit, pushes[:1])


class AppliesInOrderOfArrival(Pserver):
    def _apply(self, model, commit, pushes):
        arrived = list(self._staged.values())
        super()._apply(model, commit, sorted(pushes, key=lambda push: arrived.index(push)))


class CountsTasks(Pserver):
    def _apply(self, model, commit, pushes):
        super()._apply(model, commit, [msgspec.structs.replace(push, samples=1) for push in pushes])


class TakesInitialValuesOnArrival(Pserver):
    def _push(self, push, model, admission):
        answer = super()._push(push, model, admission)
        if push.step == INIT_STEP and isinstance(answer, Pushed):
            for key in self._staged:
                self._staged[key] = next(iter(self._staged.values()))
        return answer


class AppliesResentBatches(Pserver):
    def _push_batch(self, src, push, model, admission):
        self._batches.at.batches[push.task] = push.batch
        return super()._push_batch(src, push, model, admission)


class CountsBatchesOfTrainers(Pserver):
    def _answer(self, src, message, model, admission):
        kept = self.__dict__.setdefault("_kept", {})
        epoch = self._batches.at.epoch
        self._batches.at = Standpoint(epoch, kept.get((src, epoch), {}))
        answer = super()._answer(src, message, model, admission)
        kept[src, self._batches.at.epoch] = self._batches.at.batches
        return answer


class CountsOneBatchAPush(Pserver):
    def _push_batch(self, src, push, model, admission):
        answer = super()._push_batch(src, push, model, admission)
        counts = self._batches.at.batches
        if counts.get(push.task) == push.batch + push.batches:
            counts[push.task] = push.batch + 1
        return answer


class AppliesBatchesOfEpochsThatAreOver(Pserver):
    def _close_epoch(self, src, message):
        return [Send(src, EpochClosed(self.term, self.generation, self._place, message.epoch))]


class TakesLatePushesAfterAll(Pserver):
    def _apply(self, model, commit, pushes):
        tasks = {push.task for push in pushes}
        late = {push.task: push for push in self._staged.values() if push.task not in tasks and push.step >= 0}
        super()._apply(model, commit, sorted([*pushes, *late.values()] if pushes else pushes, key=lambda p: p.task))


# -- trainers ----------------------------------------------------------------------------------------------------------


class WaitsForOneAcknowledgement(Trainer):
    """Sends a push to all pservers, and waits for the first."""

    def _push_parts(self, rows, spans, message):
        flow = super()._push_parts(rows, spans, message)
        next(flow)
        while not self._exchange._answers:
            yield
        flow.close()


class TakesRefusalsForAnswers(Trainer):
    def push(self, *args):
        try:
            yield from super().push(*args)
        except PushRefused:
            return


class GoesOnWhereTheFirstPserverIs(Trainer):
    def where(self, task):
        places, self._pservers = self._pservers, self._pservers[:1]
        first = yield from super().where(task)
        self._pservers = places
        return first


# -- the master --------------------------------------------------------------------------------------------------------


class KeepsTasksOfTheDead(Master):
    def _release(self, member):
        if member in self.members:
            super()._release(member)


class AnswersAnew(Master):
    def _open_request(self, src, message, now_s):
        self._answered.pop(message.member, None)
        return super()._open_request(src, message, now_s)


class EndsBeforeAllIsApplied(Master):
    def _end_if_finished(self):
        if self._finished and all(t.member in self._finished for t in self.members.trainers()):
            self.end(None)


class SaysNothing(Master):
    def _waiting_for(self, now_s):
        return ""


class HandsOutEarly(SyncEpoch):
    """Hands out tasks of the next step while the present one is not complete."""

    def __init__(self, *args):
        self._early = {}
        super().__init__(*args)

    def hand_out(self, member, now):
        task = super().hand_out(member, now)
        if task is not None or self.is_closed or self.step + 1 >= self.steps:
            return task
        for index in range(self._streams):
            start, stop = sync_task(self.data.samples, self._streams, self.data.batch_size, self.step + 1, index)
            if start < stop and index not in [early for early, *_ in self._early.values()]:
                attempt = self._numbers.next()
                self._early[attempt] = index, member, now.time_s
                step = self._first_version + self.step + 1
                return SyncTask(now.request, now.term, now.generation, attempt, self.number, step, index, start, stop)
        return None

    def commit(self):
        chosen = super().commit()
        if chosen is not None:
            for attempt, (index, member, since_s) in self._early.items():
                self._pool._todo.pop(index, None)
                self._pool._tasks[index] = _Pending({attempt: (member, since_s)}, {attempt})
                self._pool._index_of[attempt] = index
            self._early = {}
        return chosen

    def release(self, member):
        super().release(member)
        self._early = {attempt: early for attempt, early in self._early.items() if early[1] != member}


def forget_values_only(self):
    self.samples, self.evict, self._base = 0, [], []
    for table in self._tables:
        table.forget_values()


def finish_any(self, attempt, finish=TaskPool.finish):
    return finish(self, attempt if attempt in self._index_of else next(iter(self._index_of), attempt))


def none_todo(self):
    return not self._fresh_left and not self._todo


def tell_the_first(self, message, tell=Pservers.tell):
    tell(self, message)
    for told in list(self._open.values())[1:]:
        told.pop()


def tell_the_newest(self, message, tell=Pservers.tell):
    for told in self._open.values():
        if told and isinstance(told[0], Commit):
            told.clear()
    tell(self, message)


def acknowledge_for_all(self, message, committed=Pservers.committed):
    committed(self, message)
    for told in self._open.values():
        if told and isinstance(told[0], Commit) and told[0].step == message.step:
            told.popleft()


def pass_over_breaks(self, done, take=Script.take):
    if not isinstance(done, BreakDone):
        take(self, done)


def keep_doing(self, member, release=Script.release):
    words = self.doing.get(member)
    release(self, member)
    if words is not None:
        self.doing[member] = words


def is_closed(self):
    return self.epoch is None or self.epoch.is_closed


def finish_in_order_of_arrival(self, done):
    if self._pool.finish(done.attempt) is None:
        return
    self.totals = done.totals if self._added == 0 else _added_up(self.totals, done.totals)
    self._added += 1
    if self.is_done:
        self.totals = {name: partial(result(total)) for name, total in self.totals.items()}


def count_messages(self, key, push, add=Parts.add):
    if push.parts > 1 and key in self._open:
        push = msgspec.structs.replace(push, part=max(self._open[key]) + 1)
    return add(self, key, push)


def forget_all(self, is_passed):
    self._open = {}


def keep_answers(self, message):
    self._answers[getattr(message, "request", 0)] = message
    self._open.pop(getattr(message, "request", None), None)
