"""Engine profiles a simulated replica can have: step-time constants, KV size, limits.

Each number's source stands beside it. Seconds depend on them; ratios between policies hardly do.
"""

from dataclasses import dataclass, field

from gateway.core.settings import EngineProfile

DEFAULT_BLOCK_TOKENS = 16  # vLLM's default on CUDA
DEFAULT_STEP_TOKENS = 8192  # vLLM's max_num_batched_tokens for an API server on H100-class GPUs


@dataclass(slots=True, frozen=True)
class Profile:
    """One simulated kind of backend. `max_model_len` never exceeds the KV cache."""

    name: str
    engine: EngineProfile
    max_model_len: int
    source: str
    block_tokens: int = field(default=DEFAULT_BLOCK_TOKENS)
    step_tokens: int = field(default=DEFAULT_STEP_TOKENS)

    @property
    def blocks(self) -> int:
        """Return the KV cache's size in blocks."""
        return self.engine.kv_tokens // self.block_tokens


# The numbers are those of `core.settings.EngineProfile`, fitted to published vLLM figures, not measured
# by us. Each stands against the data sheet (H100 SXM: 3.35 TB/s, 989 TFLOPS dense bf16) and the model's
# card (Llama-3.1-8B: 32 layers, 4,096 wide, 8 KV heads of 128; 16 GB of weights, 128 KiB KV a token):
# step_s 6.5 ms: weights once through memory 4.8 ms, and 1.7 ms to schedule, launch and sample.
# prefill_token_s 30 us: 2 x 8e9 FLOP a token at 54 % of peak.
# attention_s 1.3 ns: 4 x 32 x 4,096 FLOP for each token and each before it, at 41 % of peak.
# sequence_s 25 us: sampling and bookkeeping of one sequence on the CPU; a fit, no data sheet has it.
# context_token_s 56 ns: 128 KiB through memory at 70 % of its bandwidth.
# kv_tokens 420,000: 0.9 x 80 GB less weights and 1 GB of activations, by 128 KiB.
# max_sequences 256, 16-token blocks, 8,192 tokens a step: vLLM's defaults on this GPU.
H100_8B = Profile(
    name="h100_8b",
    engine=EngineProfile(),  # the core's priors are this profile
    max_model_len=131_072,  # Llama-3.1-8B
    source="Linear step model of vLLM V1, 8B dense bf16 on one H100, fitted to published figures "
    "(an 8,000-token prompt alone: TTFT 0.290 s, ITL 6.98 ms); not measured on a GPU.",
)

# A mixture of 35e9 active parameters on eight of these GPUs: fitted with the same published figures.
# Against the data sheet: prefill at 22 % of peak (routing and all-to-all), attention at 39 % (62 layers,
# 96 heads of 128), KV reads at 60 % of bandwidth (62 layers, 8 KV heads); step, sequences and the size
# of the KV cache are the fit's own.
MOE_8X = Profile(
    name="moe_8x",
    engine=EngineProfile(
        step_s=18e-3,
        prefill_token_s=40e-6,
        attention_s=1.0e-9,
        sequence_s=60e-6,
        context_token_s=16e-9,
        kv_tokens=1_000_000,
    ),
    max_model_len=262_144,  # Qwen3-Coder-480B-A35B
    source="Same model, a large mixture of experts over 8 GPUs; fitted to published figures.",
)

# L4 against H100 SXM by data sheet: memory 300 against 3,350 GB/s (11.2x), dense bf16 121 against
# 989 TFLOPS (8.2x). Weights 16 GB / 0.3 TB/s = 53 ms a step, + 1.7 ms that H100's 6.5 ms has above
# its own 4.8 ms. KV: 0.9 * 24 GB - 16 GB weights - 1.6 GB activations = 4 GB / 128 KiB a token.
L4_8B = Profile(
    name="l4_8b",
    engine=EngineProfile(
        step_s=55e-3,
        prefill_token_s=245e-6,
        attention_s=10.7e-9,
        sequence_s=25e-6,  # sampling and scheduling on the CPU: as on H100
        context_token_s=627e-9,
        kv_tokens=30_720,
    ),
    max_model_len=16_384,
    source="h100_8b scaled by data-sheet memory bandwidth (11.2x) and bf16 compute (8.2x).",
)

# One token stands for eight of h100_8b: an eighth of the KV cache and of the budget, linear terms
# x 8, the quadratic one x 64. A 5k prompt then costs what 40k cost there, with an eighth of the
# text to move: what a demonstration on two CPU cores can carry without measuring itself.
DEMO = Profile(
    name="demo",
    engine=EngineProfile(
        step_s=6.5e-3,
        prefill_token_s=240e-6,
        attention_s=83.2e-9,
        sequence_s=25e-6,
        context_token_s=448e-9,
        kv_tokens=52_480,
    ),
    max_model_len=16_384,
    source="h100_8b with every length divided by eight.",
    step_tokens=1024,
)

PROFILES: dict[str, Profile] = {p.name: p for p in (H100_8B, MOE_8X, L4_8B, DEMO)}
