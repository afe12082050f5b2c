"""Settings of how many processes a model is spread over, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace_core.config import option, require
from headrace_engine.multiproc.engines_here import check_engines_here
from headrace_engine.multiproc.expert_settings import DEFAULT_ALL2ALL, check_expert_parallel

MOST_RANKS = 64
"""Largest ``tensor_parallel_size``."""
MOST_ENGINES = 64
"""Largest ``data_parallel_size``."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Over how many processes the model is spread."""

    tensor_parallel_size: int = option(
        1, "Ranks over which each layer is divided: processes of this machine, each with its share of the "
        "CPU's threads, of the weights and of the KV cache.", other_flag="-tp",
    )  # fmt: skip
    pipeline_parallel_size: int = option(
        1, "Stages over which the layers are divided: each has a range of them, their part of the KV cache, "
        "and tensor_parallel_size ranks, processes of this machine.", other_flag="-pp",
    )  # fmt: skip
    enable_sp: bool = option(
        False, "Sequence parallelism: between the divided layers of large steps each of the "
        "tensor_parallel_size ranks adds and norms its part of the tokens, in place of all of them.",
        cost="such steps are not recorded; tensors of all tokens still cross between the ranks",
    )  # fmt: skip
    prefill_context_parallel_size: int = option(
        1, "Groups of tensor_parallel_size ranks that divide the tokens of long prompts: each has all weights"
        " and the whole KV cache, and computes a part of each prompt. Everything else every group computes.",
        other_flag="-pcp",
        cost="the memory of weights and cache so many times; short steps are computed by every group, with "
        "its share of the threads",
    )  # fmt: skip
    decode_context_parallel_size: int = option(
        1, "Ranks of tensor_parallel_size that share the tokens of key-value heads of which they would keep "
        "copies: the same memory caches so many times the tokens. Must divide tensor_parallel_size, and the "
        "number of copies of each head (all ranks for latent attention).", other_flag="-dcp",
        cost="each layer's queries and outputs cross between the ranks",
    )  # fmt: skip
    cp_kv_cache_interleave_size: int = option(
        1, "Consecutive tokens that one rank of decode_context_parallel_size keeps before the next one's "
        "turn. Must divide block_size.",
    )  # fmt: skip
    data_parallel_size: int = option(
        1, "Engines behind one front end: processes of this machine, each with a whole model, a KV cache of "
        "its own and its share of the CPU's threads. A request runs in one of them. With "
        "enable_expert_parallel they share the experts of mixtures.", other_flag="-dp",
        cost="the weights' memory, once for each engine; with shared experts engines wait for each other in "
        "every step, and end together",
    )  # fmt: skip
    data_parallel_size_local: int | None = option(
        None, "Engines of this server, of data_parallel_size engines in all, where several servers share a "
        "load that something in front of them divides (hybrid load balancing; each server balances among its "
        "own). Default: all, or the one of data_parallel_rank.", other_flag="-dpl",
    )  # fmt: skip
    data_parallel_start_rank: int | None = option(
        None, "Number of the first of data_parallel_size_local engines of this server.",
        other_flag="-dpr",
    )  # fmt: skip
    data_parallel_rank: int | None = option(
        None, "Number of this server's one engine, of data_parallel_size engines in as many servers, where "
        "something in front of them divides the load (external load balancing). KV events bear it, and go to "
        "the port with this number added.", other_flag="-dpn",
    )  # fmt: skip
    data_parallel_external_lb: bool = option(
        False, "Say that data_parallel_rank is given on purpose: start only with it.",
        other_flag="-dpe",
    )  # fmt: skip
    data_parallel_hybrid_lb: bool = option(
        False, "Say that data_parallel_start_rank is given on purpose: start only with it.",
        other_flag="-dph",
    )  # fmt: skip
    enable_elastic_ep: bool | None = option(
        None, "Let engines be added and taken away while the server runs (POST /scale_elastic_ep). Default: "
        "on with data_parallel_size above 1; give it for a server that starts with one engine.",
        cost="one engine, too, runs in a process of its own",
    )  # fmt: skip
    distributed_executor_backend: str | None = option(
        None, "Executor of the workers: uni (one, in the engine's process), mp (a process for each further "
        "rank), ray (an actor for each further rank), external_launcher (torchrun has started the processes; "
        "LLM only), or a plug-in's name. Default: uni for one rank, else mp.",
    )  # fmt: skip
    communicator: str = option(
        "auto", "Way in which ranks exchange tensors: gloo or shm on a CPU; cuda, custom, symm_mem, pynccl "
        "or nccl on GPUs; or a plug-in's name. auto: shm where it is installed and the ranks share memory, "
        "else gloo; cuda on GPUs, which adds up each tensor in the way that suits its size.",
        cost="cuda, custom and symm_mem keep 16 to 256 MiB of each GPU, by its kind and the number of ranks",
    )  # fmt: skip
    worker_extension_cls: str = option(
        "", "A class of your own, as 'package.module:Class': the workers get its methods, and collective_rpc "
        "may call them by name.",
        cost="its code runs in the engine's threads, between two steps: nothing else runs meanwhile",
    )  # fmt: skip
    nnodes: int = option(
        1, "Hosts over which the ranks are divided, each with as many, in order. Each runs the same command "
        "with its own node_rank; those above 0 with --headless.", other_flag="-n",
    )  # fmt: skip
    node_rank: int = option(0, "Number of this host; 0 has rank 0, and serves.", other_flag="-r")
    master_addr: str = option(
        "127.0.0.1", "Address of host 0 at which the other hosts join, and ranks meet. One that only trusted "
        "hosts reach: tensors and prompts travel unencrypted.",
    )  # fmt: skip
    master_port: int = option(29501, "Port of host 0 at which the other hosts join.")
    node_secret_file: str | None = option(
        None, "File with a secret of at least 16 bytes, the same on all hosts, which prove to each other "
        "that they know it. Default: HEADRACE_NODE_SECRET. One of both is needed unless master_addr is "
        "loopback.",
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False, "Give each of the tensor_parallel_size ranks whole experts of mixtures, in place of some "
        "inner columns of all experts; with data_parallel_size, each rank of all engines. Everything else is "
        "divided as without.", other_flag="-ep",
        cost="a rank whose experts get more tokens than others' makes the others wait",
    )  # fmt: skip
    expert_placement_strategy: Literal["linear", "round_robin"] = option(
        "linear", "Experts of a rank: linear (neighbours) or round_robin (every so many-th)."
    )
    all2all_backend: str = option(
        DEFAULT_ALL2ALL, "Way in which tokens and experts' results meet. Only allgather_reducescatter: all "
        "ranks have all tokens (of several engines they get them at each mixture), and sum their experts' "
        "results.",
    )  # fmt: skip
    enable_eplb: bool = option(
        False, "Count the tokens of experts, and move experts between ranks so that all get equally many "
        "(expert parallel load balancing).",
        cost="a short pause every eplb_config.step_interval steps; log-probabilities change in their last "
        "bits when experts move",
    )  # fmt: skip
    eplb_config: Mapping[str, Any] = option(
        {}, "JSON: settings of enable_eplb: window_size (steps that are counted, 1000), step_interval (steps "
        "between moves, 3000), num_redundant_experts (further copies, 0), log_balancedness (false), "
        "use_async (false: a step's end waits for the weights), policy (default).",
    )  # fmt: skip

    @property
    def executor(self) -> str:
        """The executor's name, chosen if it was left out."""
        alone = self.num_ranks == 1 and not self.shares_experts
        return self.distributed_executor_backend or ("uni" if alone else "mp")

    @property
    def is_replicated(self) -> bool:
        """True if the front has several engines, or one beside which others may come."""
        return self.num_engines_here > 1 or bool(self.enable_elastic_ep)

    @property
    def num_engines_here(self) -> int:
        """Engines of this server, at its start."""
        if self.data_parallel_rank is not None:
            return 1
        return self.data_parallel_size_local or self.data_parallel_size

    @property
    def first_engine(self) -> int:
        """Number of this server's first engine, among those of all servers."""
        return self.data_parallel_rank or self.data_parallel_start_rank or 0

    @property
    def is_elastic(self) -> bool:
        """True if the number of engines may change."""
        may_change = self.enable_elastic_ep is not False and self.data_parallel_start_rank is None
        return self.is_replicated and may_change and not self.shares_experts

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine."""
        context = self.prefill_context_parallel_size
        return self.tensor_parallel_size * self.pipeline_parallel_size * context

    @property
    def shares_experts(self) -> bool:
        """True if several engines have experts in common, and run their passes together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    def describe_ranks(self) -> str:
        """The settings that make several ranks, for messages."""
        sizes = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "prefill_context_parallel_size": self.prefill_context_parallel_size,
        }
        named = [f"{name} = {size}" for name, size in sizes.items() if size > 1]
        if self.shares_experts:
            named.append(
                f"data_parallel_size = {self.data_parallel_size} with enable_expert_parallel"
            )
        return " and ".join(named) or "tensor_parallel_size = 1"

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        require(
            1 <= size <= MOST_RANKS, "parallel.tensor_parallel_size", size, f"in 1..{MOST_RANKS}"
        )
        engines, stages = self.data_parallel_size, self.pipeline_parallel_size
        require(1 <= engines <= MOST_ENGINES, "parallel.data_parallel_size", engines,
               f"in 1..{MOST_ENGINES}")  # fmt: skip
        most = MOST_RANKS // size
        require(1 <= stages <= most, "parallel.pipeline_parallel_size", stages,
               f"in 1..{most}: {MOST_RANKS} ranks at most, {size} for each stage")  # fmt: skip
        self._check_prefill_context()
        ranks = engines * self.num_ranks
        require(not self.shares_experts or ranks <= MOST_RANKS, "parallel.data_parallel_size", engines,
               f"at most {MOST_RANKS // self.num_ranks} with enable_expert_parallel and {self.num_ranks} "
               f"ranks of each engine: {MOST_RANKS} ranks can share experts")  # fmt: skip
        self._check_context()
        require(not self.enable_sp or (size > 1 and not self.enable_expert_parallel and stages == 1),
               "parallel.enable_sp", self.enable_sp, "left out with tensor_parallel_size = 1, with "
               "pipeline_parallel_size above 1, and with enable_expert_parallel")  # fmt: skip
        executor = self.distributed_executor_backend
        require(self.num_ranks == 1 or executor != "uni", "parallel.distributed_executor_backend", executor,
               f"'mp', or left out, with {self.describe_ranks()}: 'uni' runs one rank")  # fmt: skip
        check_engines_here(self)
        check_expert_parallel(self)
        self._check_nodes()

    def _check_prefill_context(self) -> None:
        """What ranks that divide prompts have not been combined with yet."""
        count, most = self.prefill_context_parallel_size, MOST_RANKS // self.tensor_parallel_size
        field = "parallel.prefill_context_parallel_size"
        require(1 <= count <= most, field, count,
               f"in 1..{most}: {MOST_RANKS} ranks at most, {self.tensor_parallel_size} of each group"
               )  # fmt: skip
        if count == 1:
            return
        for name, value in (
            ("pipeline_parallel_size", self.pipeline_parallel_size > 1 and "above 1"),
            ("decode_context_parallel_size", self.decode_context_parallel_size > 1 and "above 1"),
            ("enable_expert_parallel", self.enable_expert_parallel and "true"),
            ("nnodes", self.nnodes > 1 and "above 1"),
            ("distributed_executor_backend", self.executor != "mp" and repr(self.executor)),
        ):
            require(not value, field, count, f"1 with {name} {value}")

    def _check_nodes(self) -> None:
        count, ranks = self.nnodes, self.num_ranks
        require(1 <= count <= ranks and ranks % count == 0, "parallel.nnodes", count,
               f"a divisor of the number of ranks, {ranks} (tensor_parallel_size times "
               "pipeline_parallel_size): each host has as many")  # fmt: skip
        require(0 <= self.node_rank < count, "parallel.node_rank", self.node_rank,
               f"in 0..{count - 1} with nnodes = {count}")  # fmt: skip
        require(not self.enable_elastic_ep or (count == 1 and self.executor != "external_launcher"),
               "parallel.enable_elastic_ep", self.enable_elastic_ep,
               "left out with nnodes above 1 and with distributed_executor_backend = 'external_launcher': "
               "engines are added on one host")  # fmt: skip
        require(not self.enable_elastic_ep or not self.enable_expert_parallel or self.data_parallel_size == 1,
               "parallel.enable_elastic_ep", self.enable_elastic_ep,
               "left out with enable_expert_parallel and data_parallel_size above 1: the ranks that experts "
               "are divided over are fixed at the start")  # fmt: skip
        require(self.executor != "ray" or self.communicator != "shm", "parallel.communicator",
               self.communicator, "'auto' or 'gloo' with distributed_executor_backend = 'ray': actors may be "
               "on several hosts")  # fmt: skip
        require(
            1 <= self.master_port <= 65535, "parallel.master_port", self.master_port, "in 1..65535"
        )
        if count == 1:
            return
        require(self.master_addr.count(":") != 1, "parallel.master_addr", self.master_addr,
               "a host's name or address alone: the port is master_port")  # fmt: skip
        require(self.data_parallel_size == 1, "parallel.data_parallel_size", self.data_parallel_size,
               f"1 with nnodes = {count}: start a server on each group of hosts, and `headrace route` in "
               "front of them")  # fmt: skip
        require(self.executor == "mp", "parallel.distributed_executor_backend", self.executor,
               f"'mp', or left out, with nnodes = {count}")  # fmt: skip
        require(self.communicator != "shm", "parallel.communicator", self.communicator,
               f"'auto' or 'gloo' with nnodes = {count}: hosts share no memory")  # fmt: skip

    def _check_context(self) -> None:
        size, context = self.tensor_parallel_size, self.decode_context_parallel_size
        require(context >= 1 and size % context == 0, "parallel.decode_context_parallel_size", context,
               f"a divisor of tensor_parallel_size = {size}")  # fmt: skip
        interleave = self.cp_kv_cache_interleave_size
        require(interleave >= 1, "parallel.cp_kv_cache_interleave_size", interleave, "at least 1")
        require(context > 1 or interleave == 1, "parallel.cp_kv_cache_interleave_size", interleave,
               "1, or left out, without decode_context_parallel_size")  # fmt: skip
