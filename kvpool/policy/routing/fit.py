"""A sum of a few effects, learnt online: seconds = x0 * f0 + x1 * f1 + ..., no x below zero.

Theory. Least squares of the relative error over observations that fade by half in `half_life` of them, drawn to a first guess as if that
had been seen a few times. Kept as normal equations, k x k for k effects, so an observation costs k^2 and nothing is stored. An effect
that comes out negative is left out and the rest solved again: time doesn't run backwards.
"""

from collections.abc import Sequence

_RIDGE = 0.02
"""Weight of the first guess, in observations of an effect's own size."""


class Fit:
    """`guess`: the first values of x. Features of an observation come in the same order."""

    def __init__(self, guess: Sequence[float], half_life: float = 500.0) -> None:
        self._guess = tuple(guess)
        self._keep = 0.5 ** (1 / half_life)
        k = len(self._guess)
        self._a = [[0.0] * k for _ in range(k)]
        self._b = [0.0] * k
        self._x: tuple[float, ...] | None = self._guess
        self._scale = [0.0] * k

    def add(self, features: Sequence[float], seconds: float) -> None:
        """What took `seconds`. Of no length or with no effect it teaches nothing."""
        expected = self.seconds(features)
        if seconds <= 0 or expected <= 0:
            return
        weight = 1.0 / (seconds * expected) ** 0.5
        for i, (row, f) in enumerate(zip(self._a, features, strict=True)):
            for j, g in enumerate(features):
                row[j] = row[j] * self._keep + weight * f * g
            self._b[i] = self._b[i] * self._keep + weight * f * seconds
            self._scale[i] = max(self._scale[i] * self._keep, weight * f * f)
        self._x = None

    def seconds(self, features: Sequence[float]) -> float:
        """What `features` should take."""
        if self._x is None:
            self._x = self._solve()
        return sum(x * f for x, f in zip(self._x, features, strict=True))

    def _solve(self) -> tuple[float, ...]:
        used = list(range(len(self._guess)))
        while used:
            found = self._among(used)
            worst = min(found, key=lambda i: found[i])
            if found[worst] >= 0:
                return tuple(found.get(i, 0.0) for i in range(len(self._guess)))
            used.remove(worst)
        return self._guess

    def _among(self, used: list[int]) -> dict[int, float]:
        """The solution in which only the effects `used` exist."""
        rows = []
        for i in used:
            ridge = _RIDGE * self._scale[i] or 1.0
            rows.append([self._a[i][j] + (ridge if i == j else 0.0) for j in used] + [self._b[i] + ridge * self._guess[i]])
        k = len(rows)
        for i in range(k):
            pivot = max(range(i, k), key=lambda r: abs(rows[r][i]))
            rows[i], rows[pivot] = rows[pivot], rows[i]
            for r in range(k):
                if r != i and rows[i][i]:
                    factor = rows[r][i] / rows[i][i]
                    rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
        return {used[i]: rows[i][k] / rows[i][i] if rows[i][i] else 0.0 for i in range(k)}
