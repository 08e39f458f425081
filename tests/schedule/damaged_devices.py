"""Simulated devices whose numbers are not finite now and then."""

from tests.schedule.simulated_device import SimulatedDevice

DAMAGED = 49  # a token from which on the numbers of a sequence are not finite


class DamagedDevice(SimulatedDevice):
    """Draws nothing after the damaged token."""

    def _prefill(self, rows):
        super()._prefill(rows)
        self._judge([row for row in rows if row.samples])

    def _fork(self, plan):
        super()._fork(plan)
        self._judge(plan.forks)

    def _judge(self, rows):
        for row in rows:
            if DAMAGED in row.sequence.prompt:
                row.new_tokens, row.not_finite = [], True
                self.rings[row.row].token = -1

    def _step(self, row, ring):
        fed, token = ring.token, super()._step(row, ring)
        if fed != DAMAGED:
            return token
        row.not_finite, ring.token = True, -1
        return None

    def _decode(self, plan):
        super()._decode(plan)
        for row in plan.decode:
            row.new_tokens = [token for token in row.new_tokens if token is not None]


class SpoilingDevice(SimulatedDevice):
    """Now and then a draft spoils a window, which then brings no token or fewer."""

    def _decode(self, plan):
        super()._decode(plan)
        for row in plan.decode:
            ring = self.rings[row.row]
            if row.request.course.without_drafts:
                assert row.num_tokens == 1
            elif ring.token >= 0 and self.spoils.random() < 0.1:
                row.not_finite, ring.token = True, -1
