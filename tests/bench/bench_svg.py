# SPDX-License-Identifier: Apache-2.0
"""Panels with curves, points and cells, side by side in an SVG."""
import math

WIDTH, HEIGHT, LEFT, TOP, SIDE = 460, 330, 60, 46, 40
STYLE = ("text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd}.frame{fill:none;stroke:#555}"
         ".band{fill:#4477aa;opacity:.18}.told{fill:none;stroke:#4477aa;stroke-width:2}"
         ".seen{fill:#cc3311}.bytes{fill:none;stroke:#888;stroke-dasharray:4 4}"
         ".curve{fill:none;stroke-width:2}.floor{stroke-dasharray:5 4}.point{stroke:none}")
COLORS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ee9933", "#555555")
TICKS = 8
ROUTE, FETCH = "#4477aa", "#cc3311"  # of cells


class Axis:
    """From the least to the most of its values; ticks: those with a number. Logarithmic."""

    def __init__(self, least, most, ticks):
        self.least, self.most, self.ticks = least, most, ticks

    @classmethod
    def of(cls, values):
        """Numbers 1, 2, 5, 10, … around these values."""
        low, high = (math.floor(math.log10(f(values))) for f in (min, max))
        some = [digit * 10 ** power for power in range(low, high + 2) for digit in (1, 2, 5)]
        least = max(one for one in some if one <= min(values))
        most = min(one for one in some if one > least and one >= max(values))
        ticks = [one for one in some if least <= one <= most]
        return cls(least, most, ticks if len(ticks) <= TICKS else
                   [one for one in some[::3] if one in ticks])

    @classmethod
    def doubled(cls, values):
        """Powers of two around these values."""
        low = math.floor(math.log2(min(values)))
        high = max(low + 1, math.ceil(math.log2(max(values))))
        return cls(1 << low, 1 << high, [1 << power for power in range(low, high + 1)])

    def at(self, value):
        """0 to 1"""
        value = min(max(value, self.least), self.most)
        return math.log(value / self.least) / math.log(self.most / self.least)


def number(value):
    for size, sign in ((10 ** 6, "M"), (10 ** 3, "k")):
        if value >= size and not value % size:
            return "%d%s" % (value // size, sign)
    return "%g" % value


def edge(values, i):
    """Between the value before the i-th one and that one."""
    if 0 < i < len(values):
        return math.sqrt(values[i - 1] * values[i])
    step = math.sqrt(values[1] / values[0]) if i == 0 else math.sqrt(values[-1] / values[-2])
    return values[0] / step if i == 0 else values[-1] * step


class Panel:
    """below: of its x axis."""

    def __init__(self, index, title, x, y, below=""):
        self.x, self.y, self.left, self.top = x, y, LEFT + index * (WIDTH + LEFT), TOP
        self.parts, self.keys = [], 0
        right = self.left + WIDTH - SIDE
        self.parts += ['<rect class="frame" x="%d" y="%d" width="%d" height="%d"/>' % (
            self.left, self.top, WIDTH - SIDE, HEIGHT), '<text x="%d" y="%d">%s</text>' % (
                self.left, self.top - 8, title)]
        for tick in x.ticks:
            self.parts.append('<text x="%.0f" y="%d" text-anchor="middle">%s</text>' % (
                self.at(tick, y.least)[0], self.top + HEIGHT + 16, number(tick)))
        for tick in y.ticks:
            at = self.at(x.least, tick)[1]
            self.parts.append('<line class="grid" x1="%d" x2="%d" y1="%.0f" y2="%.0f"/>' % (
                self.left, right, at, at) + '<text x="%d" y="%.0f" text-anchor="end">%s</text>' % (
                    self.left - 6, at + 4, number(tick)))
        if below:
            self.parts.append('<text x="%d" y="%d">%s</text>' % (
                self.left, self.top + HEIGHT + 34, below))

    def at(self, x, y):
        return (self.left + self.x.at(x) * (WIDTH - SIDE), self.top + HEIGHT - self.y.at(y) * HEIGHT)

    def points(self, some):
        return " ".join("%.1f,%.1f" % self.at(*one) for one in some)

    def line(self, kind, some, closed=False):
        self.parts.append('<%s class="%s" points="%s"/>' % (
            "polygon" if closed else "polyline", kind, self.points(some)))

    def curve(self, name, some, color, floor=False):
        """Points with lines between them, and a key. floor: dashed, without points."""
        self.parts.append('<polyline class="curve%s" stroke="%s" points="%s"/>' % (
            " floor" if floor else "", color, self.points(some)))
        for x, y in () if floor else [self.at(*one) for one in some]:
            self.parts.append('<circle class="point" fill="%s" cx="%.1f" cy="%.1f" r="3.5"/>' % (
                color, x, y))
        x, y = self.left + 12, self.top + 18 + 16 * self.keys
        self.keys += 1
        self.parts.append('<line class="curve%s" stroke="%s" x1="%d" x2="%d" y1="%d" y2="%d"/>'
                          '<text x="%d" y="%d">%s</text>' % (
                              " floor" if floor else "", color, x, x + 22, y - 4, y - 4, x + 28, y,
                              name))

    def cell(self, xs, ys, i, j, color, opacity):
        """Of the i-th of these values and the j-th of those, up to the middle between two."""
        (left, low), (right, high) = (self.at(edge(xs, i + k), edge(ys, j + k)) for k in (0, 1))
        self.parts.append('<rect fill="%s" opacity="%.2f" x="%.1f" y="%.1f" width="%.1f" '
                          'height="%.1f"/>' % (color, opacity, left, high, right - left - 1,
                                               low - high - 1))

    def mark(self, x, y, sign=""):
        """A point; sign: < or >, beyond it."""
        x, y = self.at(x, y)
        if not sign:
            self.parts.append('<circle class="seen" cx="%.1f" cy="%.1f" r="4"/>' % (x, y))
            return
        up = -8 if sign == ">" else 8
        self.parts.append('<path class="seen" d="M%.1f,%.1f l-5,0 l5,%d l5,%d z"/>' % (
            x, y, up, -up))


def write(path, panels, below):
    width, height = len(panels) * (WIDTH + LEFT), TOP + HEIGHT + 64
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d">' % (width, height),
             "<style>%s</style>" % STYLE, '<rect width="%d" height="%d" fill="#fff"/>' % (
                 width, height), *(part for panel in panels for part in panel.parts),
             '<text x="%d" y="%d">%s</text>' % (LEFT, TOP + HEIGHT + 54, below), "</svg>", ""]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
