"""Drive an engine step by step, and show what it counted.

    python examples/offline_metrics.py
    python examples/offline_metrics.py --model ./my-model --max-model-len 2048

Every engine setting may be given. Without a model the bundled demo model runs.
"""

from __future__ import annotations

from headrace import EngineArgs, LLMEngine, SamplingParams
from headrace.arguments import Parser
from headrace.metrics import Counter, Gauge, Histogram, Metric, Vector

PROMPTS = ["What is 2 + 3?", "Hello", "Say one", "The red box is in the"]


def main() -> None:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    args = EngineArgs.from_cli_args(parser.parse_args())
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLMEngine.from_engine_args(args) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        for metric in engine.get_metrics():
            print(line(metric))


def line(metric: Metric) -> str:
    """A metric as one line."""
    more = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
    name = f"{metric.name} {more or ''}".rstrip()
    if isinstance(metric, Counter | Gauge):
        return f"{name} = {metric.value}"
    if isinstance(metric, Vector):
        return f"{name} = {metric.values}"
    assert isinstance(metric, Histogram)
    filled = {bound: count for bound, count in metric.buckets.items() if count}
    return f"{name}: {metric.count} observations, sum {metric.sum:.4g}, up to {filled}"


if __name__ == "__main__":
    main()
