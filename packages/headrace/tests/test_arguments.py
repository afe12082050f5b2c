from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from headrace import demo
from headrace.arguments import Parser, default_of, human_int
from headrace.cli.serve import complete, make_parser, settings_from
from headrace.engine_args import ENGINE_OPTIONS, JSON_SECTIONS, EngineArgs
from headrace.unsupported_flags import SHORT, UNBUILT
from headrace_core.errors import ConfigError, MissingDependency
from headrace_server.lora.modules import parse_modules


@pytest.fixture
def parser():
    parser = Parser(prog="headrace test")
    parser.add_model()
    return EngineArgs.add_cli_args(parser)


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2m", 2_000_000), ("2M", 2 << 20),
     ("1g", 10**9), ("1G", 1 << 30), ("-1", -1)],
)  # fmt: skip
def test_human_sizes(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["1.5K", "1.5", "x", "", "1kb", "1.0001k"])
def test_sizes_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError):
        human_int(text)


def test_dashes_and_underscores_are_the_same(parser):
    args = parser.parse_args(["--max_num_seqs", "3", "--block_size=8"])
    assert (args.max_num_seqs, args.block_size) == (3, 8)


def test_booleans_have_a_no_form(parser):
    assert parser.parse_args([]).enable_prefix_caching is None
    assert parser.parse_args(["--enable-prefix-caching"]).enable_prefix_caching is True
    assert parser.parse_args(["--no-enable-prefix-caching"]).enable_prefix_caching is False
    assert parser.parse_args(["--async-scheduling"]).async_scheduling is True


def test_json_whole_and_dotted(parser):
    args = parser.parse_args(
        ["--hf-overrides", '{"a": 1}', "--override-generation-config.top_k", "3",
         "--override-generation-config.deep.er", "x", "--override_generation_config.list+=1,b"]
    )  # fmt: skip
    assert args.hf_overrides == {"a": 1}
    assert args.override_generation_config == {"top_k": 3, "deep": {"er": "x"}, "list": [1, "b"]}


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "1" * 5000 + "]"])
@pytest.mark.parametrize("flag", ["--speculative-config", "--allowed-origins"])
def test_json_that_python_does_not_read_is_a_usage_error(flag, text, capsys):
    parser = make_parser()
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([flag, text])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "is not valid JSON" in said
    assert len(said) < 2000


def test_bad_json_is_a_usage_error(parser, capsys):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--hf-overrides", "{"])
    assert caught.value.code == 2
    assert "not valid JSON" in capsys.readouterr().err


def test_an_unknown_flag_gets_the_nearest(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-num-seq", "3"])
    assert "--max-num-seqs" in capsys.readouterr().err


def test_an_unknown_flag_with_a_space_in_its_value_is_no_model(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(['--hf-override={"a": 1}'])
    assert "unrecognized arguments: --hf-override" in (said := capsys.readouterr().err)
    assert "--hf-overrides" in said


def test_lists_collect(parser):
    args = parser.parse_args(["--served-model-name", "a", "b", "--served-model-name", "c"])
    assert args.served_model_name == ["a", "b", "c"]


def test_config_file_is_below_the_command_line(parser, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: from-file\nmax-num-seqs: 4\nmax_model_len: 2K\nenable_prefix_caching: false\n"
        "async-scheduling: true\nserved-model-name: [x, y]\nhf-overrides: {a: {b: 1}}\n"
    )
    args = parser.parse_args(["--config", str(file), "--max-num-seqs", "7"])
    assert (args.model, args.max_num_seqs, args.max_model_len) == ("from-file", 7, 2048)
    assert (args.enable_prefix_caching, args.async_scheduling) == (False, True)
    assert args.served_model_name == ["x", "y"]
    assert args.hf_overrides == {"a": {"b": 1}}
    positional = parser.parse_args(["mine", f"--config={file}"])
    assert positional.model == "mine"


def test_adapters_in_all_forms(tmp_path):
    one, two = {"name": "b", "path": "/y"}, '[{"name": "c", "path": "/z"}]'
    file = tmp_path / "c.yaml"
    file.write_text(f"enable-lora: true\nlora-modules:\n- a=/x\n- {json.dumps(one)}\n- '{two}'\n")
    typed = ["--lora-modules", "a=/x", json.dumps(one), "--lora-modules", two]
    for words in (["--config", str(file)], ["--enable-lora", *typed]):
        args = make_parser().parse_args(words)
        assert args.enable_lora
        settings = settings_from(args, {"HEADRACE_ALLOW_RUNTIME_LORA_UPDATING": "1"})
        assert [module.name for module in parse_modules(settings.lora_modules)] == ["a", "b", "c"]
        assert settings.allow_runtime_lora_updating
    alone = make_parser().parse_args(["--lora-modules", "a=/x"])
    with pytest.raises(ConfigError, match="--enable-lora"):
        complete(alone, settings_from(alone, {}))


def test_a_positional_model_wins(parser):
    assert parser.parse_args(["mine"]).model == "mine"
    assert parser.parse_args(["mine", "--model", "other"]).model == "mine"
    assert parser.parse_args(["--model", "other"]).model == "other"
    assert parser.parse_args([]).model is None


@pytest.mark.parametrize("name", ["c.json", "c.yaml"])
def test_a_config_file_that_cannot_be_used(parser, tmp_path, capsys, name):
    file = tmp_path / name
    file.write_text("- a list\n")
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", str(file)])
    assert name in capsys.readouterr().err


def test_help_by_group_by_flag_and_in_short(parser, capsys):
    for words, inside, outside in (
        (["--help=cacheconfig"], "--block-size", "--max-num-seqs"),
        (["--help=max_num_seqs"], "--max-num-seqs", "--block-size"),
        (["--help"], "--help=all", "--block-size"),
        (["--help=all"], "--block-size", "no such thing"),
    ):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(words)
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert inside in shown
        assert outside not in shown


def test_help_for_what_does_not_exist(parser, capsys):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--help=nonsense"])
    assert caught.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_every_flag_has_the_default_of_its_field(parser):
    args = parser.parse_args([])
    for name, (_, option) in ENGINE_OPTIONS.items():
        assert getattr(args, name) == default_of(option), name


def test_round_trip():
    parser = EngineArgs.add_cli_args(Parser(prog="x"))
    args = EngineArgs.from_cli_args(parser.parse_args(["--max-num-seqs", "3", "--dtype", "half"]))
    assert EngineArgs(**args.as_dict()) == args
    config = args.create_engine_config()
    assert config.scheduler.max_num_seqs == 3
    assert config.model.dtype == "float16"


def test_disable_log_stats_is_the_opposite_of_log_stats():
    for disabled in (True, False):
        args = EngineArgs(disable_log_stats=disabled)
        assert args == EngineArgs(log_stats=not disabled)
        assert args.disable_log_stats is disabled
        assert args.create_engine_config().observability.log_stats is not disabled
    assert EngineArgs(disable_log_stats=None) == EngineArgs()
    assert EngineArgs(disable_log_stats=True, log_stats=False).disable_log_stats
    with pytest.raises(TypeError, match="disable_log_stats = True contradicts log_stats = True"):
        EngineArgs(disable_log_stats=True, log_stats=True)
    with pytest.raises(TypeError, match="disable_log_stats = 'no': must be True or False"):
        EngineArgs(disable_log_stats="no")


def test_unknown_keywords_are_a_type_error_with_a_hint():
    with pytest.raises(TypeError, match="max_num_seqs"):
        EngineArgs(max_num_seq=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": "1k"}, "model.max_model_len = '1k': must be a whole number"),
        ({"max_model_len": 64.0}, "model.max_model_len = 64.0: must be a whole number"),
        ({"max_num_seqs": True}, "scheduler.max_num_seqs = True: must be a whole number"),
        ({"max_audio_seconds": "9"}, "speech.max_audio_seconds = '9': must be a number"),
        ({"gpu_memory_utilization": [0.5]}, r"= \[0.5\]: must be a number"),
        ({"trust_remote_code": "no"}, "model.trust_remote_code = 'no': must be True or False"),
        ({"io_processor_plugin": 5}, "model.io_processor_plugin = 5: must be text"),
        ({"hf_overrides": "x"}, "hf_overrides = 'x': must be a mapping, or a function"),
        ({"hf_overrides": ["x"]}, r"hf_overrides = \(.*\): must be a mapping, or a function"),
        ({"limit_mm_per_prompt": dict}, "limit_mm_per_prompt = <class .*: must be a mapping"),
        ({"limit_mm_per_prompt": "audio"}, "limit_mm_per_prompt = 'audio': must be a mapping"),
    ],
)
def test_settings_of_another_kind(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**given).create_engine_config()


def test_overrides_by_a_function():
    made = EngineArgs(hf_overrides=dict.copy).create_engine_config()
    assert made.model.hf_overrides is dict.copy


@pytest.mark.parametrize("flag", ["--pooler-config", "--override-pooler-config"])
def test_the_old_name_of_a_flag(flag):
    parser = EngineArgs.add_cli_args(Parser(prog="test"))
    for words in ([flag, '{"pooling_type": "CLS"}'], [f"{flag}.pooling_type", "CLS"]):
        made = EngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()
        assert made.model.pooler.pooling_type == "CLS"


def test_none_for_a_mapping_is_an_empty_one():
    names = ("hf_overrides", "limit_mm_per_prompt", "pooler_config", "override_generation_config",
             "fair_weights", "kernels", "model_loader_extra_config", "profiler_config")  # fmt: skip
    settings = EngineArgs(**dict.fromkeys(names)).create_engine_config()
    assert settings == EngineArgs().create_engine_config()
    assert EngineArgs(model=Path("x"), max_num_seqs=np.int64(3)).create_engine_config()


def test_flags_cover_every_config_field():
    from headrace_engine.config import EngineConfig

    whole = [section for section, _ in JSON_SECTIONS.values()]  # one flag each
    for section in dataclasses.fields(EngineConfig):
        if isinstance(section.default_factory, type) and section.name not in whole:
            for option in dataclasses.fields(section.default_factory):
                assert (section.name, option) in [(s, o) for s, o in ENGINE_OPTIONS.values()]


def test_lists_as_words_or_as_json(capsys):
    from headrace_server.settings import ServerSettings

    parser = Parser(prog="headrace test")
    parser.add_config(ServerSettings, "Frontend")
    for words in (
        ["https://a", "https://b"], ['["https://a", "https://b"]'], ['["https://a"]', "https://b"],
    ):  # fmt: skip
        found = parser.parse_args(["--allowed-origins", *words])
        assert found.allowed_origins == ["https://a", "https://b"]
    for wrong in ("[1]", "[", '["a"'):
        with pytest.raises(SystemExit):
            parser.parse_args(["--allowed-origins", wrong])
        assert "JSON" in capsys.readouterr().err
    assert parser.parse_args([]).strict_requests is None
    assert parser.parse_args(["--no-strict-requests"]).strict_requests is False


def test_a_section_whole_or_in_parts():
    flag = "--structured-outputs-config"
    parser = EngineArgs.add_cli_args(Parser(prog="test"))
    whole = parser.parse_args([flag, '{"backend": "guidance", "compile_seconds": 2}'])
    parts = parser.parse_args([f"{flag}.backend", "guidance", f"{flag}.compile_seconds", "2"])
    made = [EngineArgs.from_cli_args(args).create_engine_config() for args in (whole, parts)]
    assert made[0] == made[1]
    assert made[0].structured_outputs.compile_seconds == 2
    assert made[0].structured_outputs.backend == "guidance"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backnd": "auto"}, "did you mean backend"),
        ({"max_depth": "deep"}, "of type int"),
        ({"disable_any_whitespace": True}, "must be False with backend 'auto'"),
        ("guidance", "must be an object"),
    ],
)
def test_a_section_with_what_it_has_not(given, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(structured_outputs_config=given).create_engine_config()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["-q", "int8"], "quantization", "int8"), (["-q=int8"], "quantization", "int8"),
        (["-tp", "2"], "tensor_parallel_size", 2), (["-tp=2"], "tensor_parallel_size", 2),
        (["-pp", "2"], "pipeline_parallel_size", 2), (["-dp", "2"], "data_parallel_size", 2),
        (["-O0"], "optimization_level", 0), (["-O", "3"], "optimization_level", 3),
        (["-O=1"], "optimization_level", 1), (["--optimization-level", "1"], "optimization_level", 1),
    ],
)  # fmt: skip
def test_short_forms_mean_the_long_ones(parser, words, field, value):
    assert getattr(parser.parse_args(words), field) == value


@pytest.mark.parametrize("flag", ["-pp"])
def test_a_short_form_is_refused_as_its_long_one_is(parser, flag):
    args = EngineArgs.from_cli_args(parser.parse_args([flag, "0"]))
    with pytest.raises(ConfigError, match=r"parallel\.pipeline_parallel_size = 0"):
        args.create_engine_config()


def test_a_command_s_own_short_form_comes_first():
    from headrace.cli.terminal import terminal_parser

    parsed = terminal_parser("chat", "", "").parse_args(["-q", "Hello", "--quantization", "int8"])
    assert (parsed.quick, parsed.quantization) == ("Hello", "int8")


def test_a_level_sets_what_the_user_left_open(parser):
    def eager(**settings):
        return EngineArgs(**settings).create_engine_config().graph.enforce_eager

    assert [eager(optimization_level=level) for level in range(4)] == [True, False, False, False]
    assert eager() is False
    assert eager(optimization_level=0, enforce_eager=False) is False
    assert eager(optimization_level=3, enforce_eager=True) is True
    args = EngineArgs.from_cli_args(parser.parse_args(["-O0", "--no-enforce-eager"]))
    assert args.create_engine_config().graph.enforce_eager is False
    with pytest.raises(
        ConfigError, match=r"graph\.optimization_level = 4: must be one of 0, 1, 2, 3"
    ):
        eager(optimization_level=4)


UNBUILT_SAMPLES = {feature: options[0] for feature, options in UNBUILT.items()}


@pytest.mark.parametrize(("feature", "option"), UNBUILT_SAMPLES.items())
def test_what_is_not_built_is_refused_by_name_everywhere(parser, tmp_path, capsys, feature, option):
    """On the command line (also switched off, dotted, or with an equals sign), in a file of flags, as a
    keyword of EngineArgs and LLM, and in a file of several models."""
    from headrace import LLM
    from headrace.multi_model.entries import name_of

    said = f"{option}: not built yet: {feature}; leave it out"
    flag = "--" + option.replace("_", "-")
    for words in (
        [flag],
        [f"{flag}=1"],
        [f"--{option}", "1"],
        [f"{flag}.x", "1"],
        [f"--no-{flag[2:]}"],
    ):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(words)
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
    file = tmp_path / "flags.yaml"
    for value in ("true", "false", "5", "text", "[a, b]", "{a: 1}"):
        for key in (option, option.replace("_", "-")):
            file.write_text(f"max-num-seqs: 4\n{key}: {value}\n")
            with pytest.raises(SystemExit):
                parser.parse_args(["--config", str(file)])
            assert said in capsys.readouterr().err
    for refusing in (EngineArgs, LLM):
        with pytest.raises(ConfigError, match=re.escape(said)) as refused:
            refusing(**{option: None})
        assert refused.value.field == option
    for key in (option, option.replace("_", "-")):
        with pytest.raises(ConfigError, match=re.escape(f"model 'm': {said}")):
            name_of({"name": "m", "model": "x", key: 1})


@pytest.mark.parametrize(("short", "option"), SHORT.items())
def test_short_forms_of_what_is_not_built(parser, capsys, short, option):
    for words in ([short, "2"], [f"{short}=2"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert f"{option}: not built yet" in capsys.readouterr().err


def test_a_demo_is_a_model_with_a_name(parser):
    args = parser.parse_args(["--demo", "text"])
    assert (args.model, args.served_model_name) == (str(demo.path("text")), [demo.NAME])
    named = parser.parse_args(["--demo", "text", "--served-model-name", "mine"])
    assert named.served_model_name == ["mine"]


def test_a_demo_and_a_model_exclude_each_other(parser, capsys):
    for words in (["x", "--demo", "text"], ["--demo", "text", "--model", "x"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert "--demo: cannot be given together with the model 'x'" in capsys.readouterr().err


def test_a_demo_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match=r"--demo vision.*headrace\[vision-demo\]"):
        demo.path("vision")
    with pytest.raises(ConfigError, match="demo = 'music': must be one of text, vision"):
        demo.path("music")
