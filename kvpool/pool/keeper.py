"""What pins do to blocks: a soft one changes the pen, a hard one grips the bytes, within the share that hard pins may hold."""

from kvpool.pool.blocks import Blocks
from kvpool.pool.limits import PoolLimits
from kvpool.pool.pens import Pens
from kvpool.pool.pins import Pins
from kvpool.pool.resident import Resident
from kvpool.pool.values import Pin, PinOutcome


class Keeper:
    """The pins of one pool and their effects. `hard_bytes`: what hard pins hold, each block once."""

    __slots__ = ("_blocks", "_limits", "_pens", "hard_bytes", "pins")

    def __init__(self, blocks: Blocks, pens: Pens, limits: PoolLimits) -> None:
        self.pins = Pins()
        self.hard_bytes = 0
        self._blocks = blocks
        self._pens = pens
        self._limits = limits

    def pin(self, block: Resident, pin: Pin) -> PinOutcome:
        """Take note of a pin, if the limits allow it; `settle` makes it count."""
        if self.pins.get(block.key, pin.owner) is None and len(self.pins) >= self._limits.max_pins:
            return PinOutcome.REFUSED
        if pin.hard and not block.hard:
            most = self._blocks.ledger.capacity_bytes * self._limits.max_pinned_percent // 100
            if self.hard_bytes + block.size > most:
                return PinOutcome.REFUSED
        self.pins.set(block.key, pin)
        return PinOutcome.PINNED

    def settle(self, block: Resident, now_ns: int) -> bool:
        """Make the block as firm as its pins say now; True when that was the last that gripped it."""
        pins = self.pins.of(block.key)
        self._pens.soften(block, bool(pins), now_ns)
        return self._harden(block, any(pin.hard for pin in pins))

    def forget(self, block: Resident) -> None:
        """The block leaves the index: its pins end."""
        for pin in self.pins.of(block.key):
            self.pins.drop(block.key, pin.owner)
        block.soft = False
        self._harden(block, False)

    def _harden(self, block: Resident, hard: bool) -> bool:
        if hard == block.hard:
            return False
        block.hard = hard
        self.hard_bytes += block.size if hard else -block.size
        if hard:
            self._blocks.grip(block)
            return False
        return self._blocks.loosen(block)
