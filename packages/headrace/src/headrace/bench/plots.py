"""Pictures of results, drawn with matplotlib (the extra ``headrace[bench]``).

A file's suffix says what it becomes: ``.png``, ``.svg``, ``.pdf``, or ``.html`` - one page that needs
nothing else, with the picture and the figures.
"""

from __future__ import annotations

import html
import importlib.util
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headrace.bench.metrics import Outcome, percentile
from headrace.bench.results import check_output
from headrace.disk import naming
from headrace_core.errors import ConfigError, MissingDependency

SUFFIXES = (".png", ".svg", ".pdf", ".html")
HELP = f"draw a picture ({', '.join(SUFFIXES)}); needs headrace[bench]"

INK, PAPER, GRID = "#1f2933", "#ffffff", "#e4e7eb"
WAIT, WORK, ACCENT, GOOD = "#f4b860", "#2f6f9f", "#c8553d", "#4f9d69"
STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {INK}; max-width: 75rem; margin: 2rem auto;
  padding: 0 1rem }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; margin-top: 1rem }}
th, td {{ text-align: left; padding: .2rem 1.5rem .2rem 0; font-weight: 400;
  border-bottom: 1px solid {GRID} }}
td {{ font-variant-numeric: tabular-nums }}
"""
AXES = {
    "output_throughput": "output tokens/s",
    "total_token_throughput": "input and output tokens/s",
    "request_throughput": "requests/s",
    "user_tokens_per_s": "tokens/s that each user sees (1 / median TPOT)",
    "median_ttft_ms": "median time to first token, ms",
    "median_tpot_ms": "median time per output token, ms",
    "median_e2el_ms": "median end-to-end latency, ms",
    "avg_latency": "latency, s",
}
"""Key of a result -> what an axis is called."""
SERIES = ("#2f6f9f", "#c8553d", "#4f9d69", "#8d6a9f", "#d69c2f", "#5f7f8f", "#a0522d", "#3d8f8f")
PHASES = (
    *SERIES,
    "#9fc3de",
    "#eab0a2",
    "#a9d0b5",
    "#cdbbd6",
    "#f0d3a0",
    "#b9c8cf",
    "#d8b59c",
    "#aad0d0",
)


def check(path: str) -> None:
    """Refuse a picture that could not be drawn, before anything was measured.

    Raises:
        ConfigError: the suffix means no kind of picture, or the file cannot be written.
        MissingDependency: matplotlib is not installed.
    """
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(
            f"picture {path!r}: its name must end in {', '.join(SUFFIXES)}", field="plot"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(
            "matplotlib", needed_for="--plot", install="pip install 'headrace[bench]'"
        )
    check_output(path, "plot")


class PlotPoint(NamedTuple):
    """One run of a sweep."""

    label: str
    """Label beside the point."""
    x: float
    y: float


def serving(outcomes: Sequence[Outcome], report: Mapping[str, Any], path: str) -> None:
    """One run of ``bench serve``: how TTFT, TPOT and ITL are spread, and each request over time."""
    served = [outcome for outcome in outcomes if outcome.error is None]
    with _figure(path, _serving_title(report), report, size=(12, 8.4)) as figure:
        places = figure.add_gridspec(3, 3, height_ratios=(1, 1.2, 0.5), hspace=0.5, wspace=0.26)
        for column, (name, title, colour) in enumerate(
            (("ttft", "Time to first token", WAIT), ("tpot", "Time per output token", WORK),
             ("itl", "Gap between tokens", GOOD))
        ):  # fmt: skip
            values = [1e3 * v for outcome in served for v in outcome.measures(name)]
            _distribution(figure.add_subplot(places[0, column]), title, values, colour)
        requests = figure.add_subplot(places[1, :])
        _requests(requests, served)
        _rate(figure.add_subplot(places[2, :], sharex=requests), served)


def curves(
    series: Mapping[str, Sequence[PlotPoint]],
    path: str,
    *,
    title: str,
    x: str,
    y: str,
    frontier: bool = False,
) -> None:
    """Lines of labelled points, as throughput against latency.

    Args:
        series: a line by its name in the legend; "" has none.
        x, y: keys of the axes' figures.
        frontier: shade the points that no other beats on both axes (more of each is better).
    """
    figures = {point.label or name: f"{point.x:.4g}, {point.y:.4g}"
               for name, points in series.items() for point in points}  # fmt: skip
    with _figure(path, title, figures, size=(9, 6)) as figure:
        axes = figure.add_subplot()
        _bare(axes)
        for colour, (name, points) in zip(
            SERIES * (len(series) // len(SERIES) + 1), series.items()
        ):
            xs, ys = [p.x for p in points], [p.y for p in points]
            axes.plot(xs, ys, "-o", color=colour, label=name or None, linewidth=2, markersize=7,
                      markeredgecolor=PAPER)  # fmt: skip
            for point in points:
                axes.annotate(point.label, (point.x, point.y), xytext=(7, 6), fontsize=9,
                              textcoords="offset points", color=INK)  # fmt: skip
        if frontier:
            best = pareto([point for points in series.values() for point in points])
            axes.step([p.x for p in best], [p.y for p in best], where="pre", color=INK,
                      linestyle=":", linewidth=1.5, label="Pareto front")  # fmt: skip
        axes.set_xlabel(AXES.get(x, x))
        axes.set_ylabel(AXES.get(y, y))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.margins(0.12)
        if frontier or any(series):
            axes.legend(frameon=False)


def pareto(points: Sequence[PlotPoint]) -> list[PlotPoint]:
    """The points that no other one beats on both axes, by ascending x."""
    best: list[PlotPoint] = []
    for point in sorted(points, key=lambda p: (-p.x, -p.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best[::-1]


def timelines(rows: Mapping[str, Mapping[str, float]], path: str, *, title: str) -> None:
    """Stacked bars of phases, one bar a row.

    Args:
        rows: name of the bar -> phase -> seconds, in order.
    """
    phases = list(dict.fromkeys(phase for row in rows.values() for phase in row))
    figures = {name: f"{sum(row.values()):.2f} s" for name, row in rows.items()}
    with _figure(path, title, figures, size=(11, 1.9 + 0.62 * len(rows))) as figure:
        axes = figure.add_subplot()
        _bare(axes, axis="x")
        for index, phase in enumerate(phases):
            lefts = [
                sum(v for p, v in row.items() if phases.index(p) < index) for row in rows.values()
            ]
            widths = [row.get(phase, 0.0) for row in rows.values()]
            axes.barh(list(rows), widths, left=lefts, label=phase, height=0.62,
                      color=PHASES[index % len(PHASES)], edgecolor=PAPER)  # fmt: skip
        for name, row in rows.items():
            axes.text(
                sum(row.values()), name, f"  {sum(row.values()):.2f} s", va="center", color=INK
            )
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("seconds since the process was started")
        axes.legend(frameon=False, ncols=min(5, len(phases)), loc="upper center",
                    bbox_to_anchor=(0.5, -0.9 / (1 + 0.62 * len(rows))))  # fmt: skip


def histogram(values: Sequence[float], path: str, *, title: str, unit: str) -> None:
    """Histogram of one measure."""
    with _figure(path, title, {"runs": len(values)}, size=(7, 4.4)) as figure:
        _distribution(figure.add_subplot(), "", values, WORK, unit)


@contextmanager
def _figure(
    path: str, title: str, figures: Mapping[str, Any], *, size: tuple[float, float]
) -> Iterator[Any]:
    """A new figure; written to ``path`` when the block ends."""
    check(path)
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=size, dpi=130, facecolor=PAPER)
    figure.suptitle(title, x=0.02, ha="left", fontsize=14, fontweight="bold", color=INK)
    yield figure
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if Path(path).suffix != ".html":
        with naming(path):
            figure.savefig(path, bbox_inches="tight", pad_inches=0.25)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", bbox_inches="tight", pad_inches=0.25)
    svg = drawn.getvalue()
    with naming(path):
        Path(path).write_text(_page(title, svg[svg.index("<svg") :], figures), encoding="utf-8")


def _page(title: str, svg: str, figures: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(_short(value))}</td></tr>"
        for name, value in figures.items()
        if value is not None and not isinstance(value, (list, dict))
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style>{svg}<table>{rows}</table></html>"
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _serving_title(report: Mapping[str, Any]) -> str:
    model = str(report["model_id"]).rstrip("/").rpartition("/")[2]
    at_once = report.get("max_concurrency")
    load = f"{at_once} at once" if at_once else f"{report['request_rate']} requests/s"
    return (
        f"{report.get('label') or report['backend']}: {model}, {load} - "
        f"{report['output_throughput']:.1f} output tokens/s"
    )


def _distribution(
    axes: Any, title: str, values: Sequence[float], colour: str, unit: str = "ms"
) -> None:
    """A histogram with marks at the median and the 99th percentile."""
    _bare(axes)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(unit)
    if not values:
        axes.text(0.5, 0.5, "nothing measured", ha="center", transform=axes.transAxes, color=INK)
        return
    ordered = sorted(values)
    # The last half per cent may be far out: it is counted in the last bar instead of flattening the rest.
    high = percentile(ordered, 99.5)
    axes.hist([min(v, high) for v in ordered], bins=min(60, 8 + round(math.sqrt(len(values)))),
              color=colour, edgecolor=PAPER, linewidth=0.4)  # fmt: skip
    for percent, style in ((50, "-"), (99, "--")):
        at = percentile(ordered, percent)
        axes.axvline(
            at, color=INK, linestyle=style, linewidth=1.2, label=f"p{percent} {at:.4g} {unit}"
        )
    axes.legend(frameon=False, fontsize=9)


def _requests(axes: Any, served: Sequence[Outcome]) -> None:
    """A bar for each request: waiting for its first token, then writing."""
    _bare(axes, axis="x")
    axes.set_title("Each request", loc="left", fontsize=11, color=INK)
    order = sorted(served, key=lambda outcome: outcome.started)
    rows = range(1, len(order) + 1)
    axes.barh(rows, [o.ttft for o in order], left=[o.started for o in order], height=0.9,
              color=WAIT, label="waiting for the first token")  # fmt: skip
    axes.barh(rows, [o.e2el - o.ttft for o in order], left=[o.started + o.ttft for o in order],
              height=0.9, color=WORK, label="writing")  # fmt: skip
    axes.invert_yaxis()
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def _rate(axes: Any, served: Sequence[Outcome]) -> None:
    """Output tokens a second over the run."""
    _bare(axes)
    times, rates = token_rate(served)
    axes.fill_between(times, rates, color=ACCENT, alpha=0.25, linewidth=0)
    axes.plot(times, rates, color=ACCENT, linewidth=1.6)
    axes.set_title("Output tokens/s", loc="left", fontsize=11, color=INK)
    axes.set_xlabel("seconds since the start of the run")
    axes.set_ylim(bottom=0)


def token_rate(served: Sequence[Outcome], num_bins: int = 60) -> tuple[list[float], list[float]]:
    """Output tokens a second over the run: middles of the bins in seconds, and rates."""
    arrivals = []
    for outcome in served:
        at = outcome.started + outcome.ttft
        arrivals.append(at)
        for gap in outcome.itls:
            at += gap
            arrivals.append(at)
    if not arrivals:
        return [], []
    end = max(arrivals)
    width = end / num_bins or 1.0
    counts = [0] * num_bins
    for at in arrivals:
        counts[min(num_bins - 1, int(at / width))] += 1
    return [(i + 0.5) * width for i in range(num_bins)], [count / width for count in counts]


def _bare(axes: Any, axis: str = "y") -> None:
    """Light grid, no box."""
    axes.grid(axis=axis, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
