"""Roles that lack one rule of how a job goes on through failures; `mutations.py` says which rule that is."""

import msgspec
import numpy as np

from evergrad.checkpoint.pieces import DensePiece
from evergrad.master.checkpoints import Checkpoints
from evergrad.master.generations import Generations
from evergrad.master.recovery import Recovery
from evergrad.pserver.batches import Batches, Standpoint
from evergrad.pserver.pserver import Pserver

# -- pservers ----------------------------------------------------------------------------------------------------------


class LoadsNoState(Pserver):
    def load(self, piece):
        super().load(piece._replace(state=np.zeros_like(piece.state)) if isinstance(piece, DensePiece) else piece)


class CutsWhereItIs(Pserver):
    def _mark(self, src, part, mark):
        at = self._batches.at
        here = {"version": self._version, "epoch": at.epoch, "standing": self._batches.standing}
        return super()._mark(src, part, msgspec.structs.replace(mark, **here))


class TakesGenerationsAsOne(Pserver):
    def _from_trainer(self, src, message):
        return super()._from_trainer(src, msgspec.structs.replace(message, generation=self.generation))


def stand_at_the_beginning(self, progress, restore=Batches.restore):
    restore(self, progress)
    self.at = Standpoint(self.at.epoch, {})


def keep_nothing_aside(self, keys, rows):
    pass


# -- the master --------------------------------------------------------------------------------------------------------


def begin_empty(self, at, source, begin=Generations.begin):
    begin(self, at, None)


def take_when_marked(self, places, take=Checkpoints.take_complete):
    if self._cut is not None and len(self._cut.marked) == places and self._cut.written:
        return take(self, len(self._cut.written))
    return None


def prune_at_once(self, result, now_s, done=Recovery.done):
    done(self, result, now_s)
    if self._must_prune:
        self._must_prune = False
        self._prune()


def record_what_is_not_known(self, make=Recovery._make_record):
    return msgspec.structs.replace(make(self), schema=self.schema)


def is_written(self, facts):
    return True
