"""The oracle: the transformer of DESIGN.md, section 2, in JAX float64 with automatic differentiation.

It shares no code and no derivation with the C and CUDA sources: the forward pass is written out from
the mathematics, every gradient comes from jax.grad, and attention is a plain T x T matrix. It writes one
small model a file to test/fixtures/NAME.safetensors (test/fixtures/README.md lists the contents), which
the tests load as a checkpoint and compare with what the program computes.

Inputs are rounded to float32 before anything is computed from them, results once at the end.

    pip install jax numpy safetensors
    python dev/reference.py            # write the fixtures
    python dev/reference.py --check    # recompute, compare with the files, and verify the oracle itself
"""

import argparse
import json
import math
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

jax.config.update("jax_enable_x64", True)

DEFAULTS = dict(
    encoding="nope", dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=24, vocab_size=40, bos=1,
    batch=2, seq_len=24, norm_eps=1e-5, ssmax_prior="inside", global_prior=0, no_seq_scale=0,
    rope_theta=500000.0, sinusoidal_theta=10000.0, sinusoidal_freqs="bam",
    theta_alpha_trainable=1, theta_beta_trainable=1, theta_mu_trainable=0,
    optimizer="radam", learning_rate=0.05, prior_lr=0.2, beta1=0.9, beta2=0.95, eps=1e-8,
    weight_decay=0.1, grad_clip=0.75, steps=3,
)  # fmt: skip

# Of encodings that differ from others in the bias alone.
SMALL = dict(n_layers=1, ffn_dim=16, vocab_size=24)
LAYERS = dict(dim=24, n_heads=3, n_kv_heads=1, ffn_dim=16, vocab_size=24, seq_len=21)  # of models whose layers differ

# Learning rates: RAdam's first five steps are momentum descent, which needs more to move the weights
# visibly; from the sixth step on, and under AdamW, a step is about learning_rate in every weight.
CASES = {
    "nope": dict(dim=24, n_heads=3, n_kv_heads=1, seq_len=17, vocab_size=96),
    "nope_ssmax": dict(encoding="nope_ssmax", seq_len=33, grad_clip=0.5),
    "sinusoidal": dict(encoding="sinusoidal", n_heads=1, n_kv_heads=1, learning_rate=0.01, steps=8),
    "sinusoidal_vaswani": dict(encoding="sinusoidal", sinusoidal_freqs="vaswani", dim=24, n_heads=3, n_kv_heads=3, n_layers=1),
    "sinusoidal_ssmax": dict(encoding="sinusoidal_ssmax", sinusoidal_theta=500.0),
    "rotary": dict(encoding="rotary", dim=96, n_kv_heads=1, n_layers=1, ffn_dim=16, vocab_size=24),
    "rotary_ssmax": dict(encoding="rotary_ssmax", dim=32, n_heads=4, ffn_dim=16, rope_theta=10000.0),
    "rotary_ssmax_frozen": dict(encoding="rotary_ssmax", no_seq_scale=1),
    "alibi": dict(encoding="alibi", dim=96, n_heads=12, n_kv_heads=3, n_layers=1, ffn_dim=16, vocab_size=24),
    "alibi_ssmax": dict(encoding="alibi_ssmax", dim=32, n_heads=4, n_kv_heads=4, n_layers=1, batch=3),
    "bam": dict(encoding="bam", dim=96, n_heads=12, n_kv_heads=3, n_layers=1, ffn_dim=16, vocab_size=24),
    "bam_global": dict(encoding="bam", global_prior=1, dim=24, n_heads=3, n_kv_heads=1, seq_len=31),
    "bam_mu": dict(encoding="bam", theta_mu_trainable=1, dim=32, n_heads=4, ffn_dim=16),
    "bam_alibi": dict(encoding="bam", theta_alpha_trainable=0, theta_beta_trainable=0),
    "bam_ssmax": dict(
        encoding="bam_ssmax", dim=24, n_heads=3, n_kv_heads=3, learning_rate=0.01, prior_lr=0.02, steps=8
    ),
    "bam_ssmax_outside": dict(encoding="bam_ssmax", ssmax_prior="outside", dim=32, n_heads=4, n_kv_heads=1, n_layers=1),
    "bam_ssmax_mu_global": dict(encoding="bam_ssmax", theta_mu_trainable=1, global_prior=1),
    "bam_ssmax_adamw": dict(encoding="bam_ssmax", optimizer="adamw", learning_rate=0.01, prior_lr=0.003),
    "kerple_log": dict(encoding="kerple_log", dim=24, n_heads=3, n_kv_heads=1, **SMALL),
    "kerple_log_ssmax": dict(encoding="kerple_log_ssmax", **SMALL),
    "kerple_power": dict(encoding="kerple_power", dim=24, n_heads=3, n_kv_heads=3, **SMALL),
    "kerple_power_ssmax": dict(encoding="kerple_power_ssmax", kerple_power_scale_trainable=0, **SMALL),
    "alibi_learned": dict(encoding="alibi_learned", dim=24, n_heads=3, n_kv_heads=1, **SMALL),
    "alibi_learned_ssmax": dict(encoding="alibi_learned_ssmax", ssmax_prior="outside", **SMALL),
    "sandwich": dict(encoding="sandwich", dim=24, n_heads=3, n_kv_heads=1, **SMALL),
    "sandwich_ssmax": dict(encoding="sandwich_ssmax", sandwich_dim=17, **SMALL),
    "t5": dict(encoding="t5", dim=24, n_heads=3, n_kv_heads=1, **(SMALL | dict(seq_len=41))),
    "t5_ssmax": dict(encoding="t5_ssmax", global_prior=1, **(SMALL | dict(n_layers=2))),
    "table": dict(encoding="table", **SMALL),
    "table_ssmax": dict(encoding="table_ssmax", ssmax_prior="outside", **SMALL),
    "alibi_geometric": dict(encoding="alibi", alibi_slopes="geometric", dim=24, n_heads=3, n_kv_heads=3, **SMALL),
    "rotary_partial": dict(encoding="rotary", rotary_fraction=0.5, dim=48, n_heads=3, n_kv_heads=1, **SMALL),
    "rotary_linear": dict(encoding="rotary", rope_scaling="linear", rope_factor=4.0, **SMALL),
    "rotary_ntk": dict(
        encoding="rotary", rotary_fraction=0.75, rope_scaling="ntk", rope_factor=4.0, dim=32, rope_theta=100.0, **SMALL
    ),
    "rotary_ssmax_yarn": dict(
        encoding="rotary_ssmax", rope_scaling="yarn", rope_factor=4.0, rope_original_length=64, rope_beta_fast=4.0,
        rope_theta=100.0, dim=32, n_kv_heads=1, **SMALL
    ),
    "rotary_yarn_partial": dict(
        encoding="rotary", rotary_fraction=0.75, rope_scaling="yarn", rope_factor=8.0, rope_original_length=32,
        rope_beta_slow=0.5, rope_attention_factor=1.5, rope_theta=50.0, dim=24, n_heads=3, n_kv_heads=3, **SMALL
    ),
    "rotary_llama3": dict(
        encoding="rotary", rope_scaling="llama3", rope_factor=8.0, rope_original_length=64, rope_theta=100.0, dim=32, **SMALL
    ),
    "learned": dict(encoding="learned", learned_length=30, **SMALL),
    "learned_ssmax": dict(encoding="learned_ssmax", learned_length=24, dim=24, n_heads=3, n_kv_heads=1, **SMALL),
    "softcap": dict(encoding="bam_ssmax", softcap=1.5, dim=24, n_heads=3, n_kv_heads=1, **SMALL),
    "softcap_outside": dict(encoding="bam_ssmax", ssmax_prior="outside", softcap=50.0, **SMALL),
    "sinks": dict(encoding="bam", sinks=1, dim=24, n_heads=3, n_kv_heads=1, **SMALL),
    "sinks_softcap": dict(encoding="alibi_ssmax", sinks=1, softcap=1.5, dim=32, n_heads=4, n_kv_heads=2, **SMALL),
    "window": dict(encoding="t5_ssmax", window=5, **SMALL),
    "log_scale": dict(encoding="bam", log_scale="2,0.7", window=9, **SMALL),
    "final_softcap": dict(final_softcap=1.5, **SMALL),
    "qk_norm": dict(encoding="rotary", qk_norm=1, dim=24, n_heads=3, n_kv_heads=1, **SMALL),
    "gated_attention": dict(encoding="alibi", gated_attention=1, dim=32, n_heads=4, n_kv_heads=2, **SMALL),
    "attention_all": dict(
        encoding="rotary_ssmax", softcap=2.0, sinks=1, window=7, final_softcap=3.0, qk_norm=1, gated_attention=1,
        **(SMALL | dict(n_layers=2)),
    ),
    "layers": dict(encoding="rotary,nope,bam_ssmax", layer_windows="7,0,4", n_layers=3, **LAYERS),
    "layers_global": dict(encoding="bam,kerple_log_ssmax", n_layers=3, global_prior=1, **LAYERS),
    "mix": dict(seed=1049, encoding="mix", dim=24, n_heads=3, n_kv_heads=1, mix_rank=8, mix_length=9, **(SMALL | dict(n_layers=2))),
    "mix_ssmax": dict(seed=1050, encoding="mix_ssmax", **SMALL),
    "mix_ssmax_outside": dict(seed=1051, encoding="mix_ssmax", ssmax_prior="outside", mix_rank=4, mix_length=30, **SMALL),
    "mix_all": dict(
        seed=1052, encoding="mix_ssmax", mix_rank=4, mix_length=12, softcap=1.5, sinks=1, window=15, qk_norm=1, gated_attention=1,
        dim=32, n_heads=4, n_kv_heads=2, **SMALL
    ),
    "fire": dict(seed=1105, encoding="fire", dim=24, n_heads=3, n_kv_heads=1, fire_length=20, **SMALL),
    "fire_ssmax": dict(seed=1106, encoding="fire_ssmax", global_prior=1, fire_length=100, **(SMALL | dict(n_layers=2))),
    "fox": dict(seed=1100, encoding="fox", dim=24, n_heads=3, n_kv_heads=1, **(SMALL | dict(n_layers=2))),
    "fox_ssmax": dict(seed=1101, encoding="fox_ssmax", **SMALL),
    "fox_ssmax_outside": dict(seed=1102, encoding="fox_ssmax", ssmax_prior="outside", optimizer="adamw", learning_rate=0.01, **SMALL),
    "fox_attention": dict(seed=1107, encoding="fox_ssmax", sinks=1, window=7, softcap=2.0, dim=24, n_heads=3, n_kv_heads=1, **SMALL),
    "cable": dict(seed=1103, encoding="cable", dim=24, n_heads=3, n_kv_heads=3, learning_rate=0.01, steps=8, **SMALL),
    "cable_ssmax": dict(seed=1104, encoding="cable_ssmax", n_kv_heads=1, **SMALL),
}

# Further options of an encoding, in its own fixtures alone.
OPTIONS = {
    "kerple_log": dict(kerple_log_scale_trainable=1, kerple_log_rate_trainable=1),
    "kerple_power": dict(kerple_power_scale_trainable=1, kerple_power_exponent_trainable=1),
    "alibi_learned": dict(alibi_log_slope_trainable=1),
    "sandwich": dict(sandwich_dim=128),
    "t5": dict(t5_bias_trainable=1),
    "table": dict(table_bias_trainable=1),
    "mix": dict(mix_rank=16, mix_length=20),
    "fire": dict(fire_scale_trainable=1, fire_hidden_trainable=1, fire_hidden_bias_trainable=1, fire_output_trainable=1),
}  # fmt: skip


def configuration(name):
    case = DEFAULTS | CASES[name]
    for encoding in case["encoding"].split(","):
        case = case | OPTIONS.get(encoding.removesuffix("_ssmax"), {}) | CASES[name]
    case["options"] = list(case)  # what the fixture's metadata says
    case["head_size"] = case["dim"] // case["n_heads"]
    return layer_case(case, 0)


def layer_case(case, n):
    """The case as layer n sees it, whose encoding and window are the next of lists that repeat."""
    encodings = case["encoding"].split(",")
    encoding = encodings[n % len(encodings)]
    own = dict(kind=encoding.removesuffix("_ssmax"), ssmax=encoding.endswith("_ssmax"))
    if "layer_windows" in case:
        windows = [int(w) or case["seq_len"] for w in case["layer_windows"].split(",")]
        own["window"] = windows[n % len(windows)]
    return case | own


# ----------------------------------------------------------------------------
# Inputs: exactly representable in float32; RandomState's stream is the same in every NumPy version


def prior_prefix(case, n):
    return "prior." if case["global_prior"] else f"layers.{n}.attention.prior."


def make_priors(case, rng, name):
    """What the encodings of all layers learn; with global_prior those of one encoding share it."""
    params = {}
    for n in range(case["n_layers"]):
        of, prefix = layer_case(case, n), prior_prefix(case, n)
        shared = case["global_prior"] and of["kind"] in [layer_case(case, earlier)["kind"] for earlier in range(n)]
        if of["kind"] in LEARNED and not shared:
            params |= {prefix + key: value for key, value in make_prior(of, rng, n, name).items()}
    return params


GATED = ("fox", "cable")
LEARNED = ("bam", "kerple_log", "kerple_power", "alibi_learned", "t5", "table", "fire")


def make_listed_prior(case, rng):
    """What encodings other than BAM learn, by name, [rows,heads,1,1]."""
    heads = case["n_heads"]
    rows = {
        "kerple_log": {"kerple_log_scale": rng.uniform(-1, 1, (1, heads)), "kerple_log_rate": rng.uniform(-2, 1, (1, heads))},
        "kerple_power": {"kerple_power_scale": rng.uniform(-2, 0, (1, heads)), "kerple_power_exponent": rng.uniform(-2, 1, (1, heads))},
        "alibi_learned": {"alibi_log_slope": np.log(alibi_slopes(heads))[None] + rng.uniform(-0.5, 0.5, (1, heads))},
        "t5": {"t5_bias": rng.standard_normal((32, heads))},
        "table": {"table_bias": rng.standard_normal((512, heads))},
    }  # fmt: skip
    if case["kind"] == "fire":  # drawn for itself alone, so that the stream of the others stays what it was
        rows["fire"] = {"fire_scale": np.log([[0.1]]), "fire_hidden": rng.uniform(-1, 1, (32, 1)), "fire_hidden_bias": rng.uniform(-1, 1, (32, 1)), "fire_output": rng.uniform(-0.5, 0.5, (32, heads))}  # fmt: skip
    return {name: value[:, :, None, None] for name, value in rows[case["kind"]].items()}


def make_prior(case, rng, layer, name):
    """theta_alpha, theta_beta, theta_mu, spread over the heads. theta_beta is below zero for one head when
    theta_mu = 0; theta_mu of both signs keeps |delta| away from its kink at every integer distance."""
    if case["kind"] != "bam":
        return make_listed_prior(case, rng)
    heads = case["n_heads"]
    alpha = rng.uniform(-1.5, 0.5, heads)
    beta = rng.uniform(0.3, 1.3, heads)
    mu = np.zeros(heads)
    if case["theta_mu_trainable"]:
        mu = np.resize([0.3, -0.2, -0.65, 0.1], heads) * (-1) ** layer
    else:
        beta[1] = -0.25
    if name == "bam_alibi":  # the log_slope initialisation: equals ALiBi
        alpha, beta = np.log(alibi_slopes(heads)), np.ones(heads)
    shape = (1, heads, 1, 1)
    return {"theta_alpha": alpha.reshape(shape), "theta_beta": beta.reshape(shape), "theta_mu": mu.reshape(shape)}


def make_parameters(case, rng, name):
    dim, kv_dim, ffn = case["dim"], case["n_kv_heads"] * case["head_size"], case["ffn_dim"]
    params = {"tok_embeddings.weight": rng.standard_normal((case["vocab_size"], dim))}

    def linear(key, rows, columns, gain=1.0):
        bound = gain / math.sqrt(columns)
        params[key] = rng.uniform(-bound, bound, (rows, columns))

    for n in range(case["n_layers"]):
        layer = f"layers.{n}."
        linear(layer + "attention.wq.weight", dim, dim, 2.0)  # twice the usual: attention far from uniform
        linear(layer + "attention.wk.weight", kv_dim, dim, 2.0)
        linear(layer + "attention.wv.weight", kv_dim, dim)
        linear(layer + "attention.wo.weight", dim, dim)
        if layer_case(case, n)["kind"] in GATED:
            linear(layer + "attention.forget.weight", case["n_heads"], dim, 2.0)
            params[layer + "attention.forget.bias"] = rng.uniform(-1, 1, case["n_heads"])
        if layer_case(case, n)["kind"] == "mix":
            linear(layer + "attention.w_mix.weight", case["n_heads"] * case["mix_rank"], dim)
            params[layer + "attention.mixed"] = rng.standard_normal((case["mix_rank"], case["mix_length"]))
        if layer_case(case, n)["ssmax"]:
            scale = np.ones(case["n_heads"])
            if not case["no_seq_scale"]:
                scale = rng.uniform(0.6, 1.4, case["n_heads"])
                scale[n % case["n_heads"]] = -0.4
            params[layer + "attention.seq_scale"] = scale.reshape(1, -1, 1, 1)
        if case.get("sinks"):
            params[layer + "attention.sink"] = rng.uniform(-1, 2, (1, case["n_heads"], 1, 1))
        if case.get("qk_norm"):
            for x in "qk":
                params[layer + f"attention.{x}_norm.weight"] = rng.uniform(0.7, 2, case["head_size"])
        if case.get("gated_attention"):
            linear(layer + "attention.gate.weight", dim, dim)
        linear(layer + "feed_forward.w1.weight", ffn, dim)
        linear(layer + "feed_forward.w2.weight", dim, ffn)
        linear(layer + "feed_forward.w3.weight", ffn, dim)
        params[layer + "attention_norm.weight"] = rng.uniform(0.7, 1.3, dim)
        params[layer + "ffn_norm.weight"] = rng.uniform(0.7, 1.3, dim)
    params |= make_priors(case, rng, name)
    params["norm.weight"] = rng.uniform(0.7, 1.3, dim)
    linear("output.weight", case["vocab_size"], dim)
    if case["kind"] == "learned":
        params["position_embeddings.weight"] = rng.standard_normal((case["learned_length"], dim))
    return {key: value.astype(np.float32) for key, value in params.items()}


def make_tokens(case, rng):
    """Packed documents. Sequence 0 starts inside a document and holds a document of one token; the others
    start with BOS; the last position of sequence 1 is a document of its own."""
    length = case["seq_len"]
    stream = rng.randint(3, case["vocab_size"], (case["batch"], length + 1))
    starts = [[5, 9, 10, length // 2 + 5], [0, 3, length - 1], [0]]
    for row, positions in zip(stream, starts):
        row[positions] = case["bos"]
    return stream[:, :-1].astype(np.int32), stream[:, 1:].astype(np.int32)


# ----------------------------------------------------------------------------
# The model


def alibi_slopes(heads, rule="published"):
    """Press et al. 2022 and its published code: for other than a power of two, the slopes of the power of
    two below, then every second slope of the power of two above."""
    if rule == "geometric":
        return 2.0 ** (-8.0 / heads * np.arange(1, heads + 1))
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    extra = [2.0 ** (-8.0 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return np.array((slopes + extra)[:heads])


def sinusoidal_embedding(case):
    """[T,C] (Vaswani et al. 2017): sines in the even channels, cosines in the odd ones."""
    channel = np.arange(case["dim"])
    exponent = channel if case["sinusoidal_freqs"] == "bam" else channel - channel % 2
    phase = np.arange(case["seq_len"])[:, None] * case["sinusoidal_theta"] ** (-exponent / case["dim"])
    return np.where(channel % 2 == 0, np.sin(phase), np.cos(phase))


def rotated_width(case):
    """Channels of a head that turn."""
    return 2 * math.floor(case.get("rotary_fraction", 1.0) * case["head_size"] / 2 + 0.5)


def yarn_range(case, dim):
    """Between which pairs YaRN goes over from turning as before to turning slower, from its published code."""
    turns = lambda n: dim * math.log(case["rope_original_length"] / (n * 2 * math.pi)) / (2 * math.log(case["rope_theta"]))
    low, high = math.floor(turns(case.get("rope_beta_fast", 32))), math.ceil(turns(case.get("rope_beta_slow", 1)))
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def rope_frequencies(case):
    """(radians per position of each pair, factor of q and k), vectorised as Hugging Face's modeling_rope_utils.py."""
    base, dim, kind = case["rope_theta"], rotated_width(case), case.get("rope_scaling", "none")
    factor, length = case.get("rope_factor"), case.get("rope_original_length")
    if kind == "ntk":  # bloc97 2023
        base = base * factor ** (dim / (dim - 2))
    inverse = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    if kind == "linear":  # Chen et al. 2023
        return inverse / factor, 1.0
    if kind == "yarn":  # Peng et al. 2023
        low, high = yarn_range(case, dim)
        extrapolated = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        inverse = inverse / factor * (1 - extrapolated) + inverse * extrapolated
        return inverse, case.get("rope_attention_factor", 0.1 * math.log(factor) + 1.0)
    if kind == "llama3":
        low, high = case.get("rope_low_freq_factor", 1), case.get("rope_high_freq_factor", 4)
        wavelength = 2 * np.pi / inverse
        smooth = (length / wavelength - low) / (high - low)
        smoothed = (1 - smooth) * inverse / factor + smooth * inverse
        scaled = np.where(wavelength > length / low, inverse / factor, inverse)
        return np.where((wavelength >= length / high) & (wavelength <= length / low), smoothed, scaled), 1.0
    return inverse, 1.0


def rotate(x, case):
    """x[B,H,T,HS] (Su et al. 2021): pair m is the complex number (2m, 2m+1), turned by pos * theta^(-2m/width)."""
    frequency, factor = rope_frequencies(case)
    width = 2 * len(frequency)
    angle = np.arange(x.shape[2])[:, None] * frequency
    turned = (x[..., 0:width:2] + 1j * x[..., 1:width:2]) * np.exp(1j * angle) * factor
    pairs = jnp.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], width)
    return jnp.concatenate([pairs, x[..., width:]], axis=-1)


def sandwich(case):
    """[heads,T] as Chi et al. 2023 publish it: sinusoidal embeddings times their transpose, here its first column."""
    width = case["sandwich_dim"]
    phase = np.arange(case["seq_len"])[:, None] / 10000.0 ** (2 * np.arange(width // 2) / width)
    embedding = np.concatenate([np.sin(phase), np.cos(phase)], axis=-1)
    compression = np.arange(1, case["n_heads"] + 1) * 8 / case["n_heads"]
    return (embedding @ embedding[0])[None] / compression[:, None]


def t5_bucket(distance):
    """Raffel et al. 2020, relative_position_bucket with bidirectional=False, 32 buckets, max_distance 128."""
    large = 16 + (np.log(np.maximum(distance, 1) / 16) / np.log(128 / 16) * 16).astype(int)
    return np.where(distance < 16, distance, np.minimum(large, 31))


def listed_bias(case, get, d):
    """P[h,i,j] at distances d[i,j] >= 0; get(name) is a tensor [rows,heads]."""
    kind, one = case["kind"], lambda name: get(name)[0][:, None, None]
    if kind == "kerple_log":  # Chi et al. 2022, equation 4
        return -jnp.exp(one("kerple_log_scale")) * jnp.log(1 + jnp.exp(one("kerple_log_rate")) * d)
    if kind == "kerple_power":  # the same, with 0 < r2 < 2
        r2 = 2 * jax.nn.sigmoid(one("kerple_power_exponent"))
        return jnp.where(d > 0, -jnp.exp(one("kerple_power_scale")) * np.maximum(d, 1.0) ** r2, 0.0)
    if kind == "alibi_learned":
        return -jnp.exp(one("alibi_log_slope")) * d
    if kind == "t5":
        return get("t5_bias").T[:, t5_bucket(d)]
    if kind == "fire":  # Li et al. 2024, equation 19, with the threshold in the place of the query's position
        c = jnp.exp(get("fire_scale")[0, 0])
        x = jnp.log(c * d + 1) / jnp.log(c * case["fire_length"] + 1)
        hidden = jax.nn.relu(get("fire_hidden")[:, 0] * x[..., None] + get("fire_hidden_bias")[:, 0])  # [i,j,32]
        return jnp.einsum("ijk,kh->hij", hidden, get("fire_output"))
    return get("table_bias").T[:, np.minimum(d, 511)]


def relative_bias(case, params, n):
    """P[h,i,j], or None."""
    distance = np.arange(case["seq_len"])[None, :] - np.arange(case["seq_len"])[:, None]  # j - i
    if case["kind"] == "alibi":
        return alibi_slopes(case["n_heads"], case.get("alibi_slopes"))[:, None, None] * distance
    if case["kind"] == "sandwich":
        return sandwich(case)[:, np.maximum(-distance, 0)]
    if case["kind"] not in LEARNED:
        return None
    prefix = prior_prefix(case, n)
    if case["kind"] != "bam":
        return listed_bias(case, lambda name: params[prefix + name][..., 0, 0], np.maximum(-distance, 0))
    alpha, beta, mu = (params[prefix + key][0] for key in ("theta_alpha", "theta_beta", "theta_mu"))
    delta = distance - (jnp.exp(mu) - jnp.exp(-mu))
    r = delta * jnp.sign(delta) + 1e-5  # not jnp.abs: JAX's derivative of that at 0 is 1, here sign(0) = 0
    return -jnp.exp(alpha) * r**beta


def mixed_bias(case, params, n, x):
    """P[b,h,i,j] of tables by distance that the query weights (Shaw et al. 2018, equation 5, with numbers of their own in
    place of the query); 0 beyond the tables."""
    weights = x @ params[f"layers.{n}.attention.w_mix.weight"].T
    weights = weights.reshape(*x.shape[:2], case["n_heads"], case["mix_rank"])
    distance = np.arange(case["seq_len"])[:, None] - np.arange(case["seq_len"])[None, :]
    within = (distance >= 0) & (distance < case["mix_length"])
    table = params[f"layers.{n}.attention.mixed"][:, np.where(within, distance, 0)]
    return jnp.einsum("bihr,rij->bhij", weights, jnp.where(within, table, 0.0))


def gate_bias(case, params, n, x):
    """P[b,h,i,j] of Lin et al. 2025 (fox) and Veisi et al. 2025 (cable): the gates of the tokens behind j up to i, of
    whole documents, added up. What no query sees is masked later."""
    layer = f"layers.{n}.attention.forget."
    gate = (x @ params[layer + "weight"].T + params[layer + "bias"]).transpose(0, 2, 1)  # [B,h,l]
    gate = jax.nn.log_sigmoid(gate) if case["kind"] == "fox" else -jax.nn.softplus(gate)
    l, i, j = np.ix_(*[np.arange(case["seq_len"])] * 3)
    return jnp.einsum("bhl,lij->bhij", gate, ((j < l) & (l <= i)).astype(float))


def cap(x, c):
    """Gemma 2 (2024): a value of at most c."""
    return x if c is None else c * jnp.tanh(x / c)


def visible_keys(case, start):
    """[B,i,j]: the document up to the query, of that the last `window` keys (Beltagy et al. 2020)."""
    position = np.arange(case["seq_len"])
    start = np.maximum(start, position - case.get("window", case["seq_len"]) + 1)
    return (start[:, :, None] <= position) & (position <= position[:, None])


def row_scale(case, params, n, visible):
    """g [B,H,i,1], or 1."""
    count = visible.sum(axis=-1)[:, None, :, None]
    if case["ssmax"]:  # Nakanishi 2025
        return params[f"layers.{n}.attention.seq_scale"] * np.log(count)
    if "log_scale" in case:
        first, slope = map(float, case["log_scale"].split(","))
        return 1 + slope * np.log(np.maximum(1, count / first))
    return 1.0


def logits(case, params, n, x, q, k, visible):
    """z[B,H,i,j], the terms in the one order of llmc/attention/terms.h."""
    c = cap(jnp.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(case["head_size"]), case.get("softcap"))
    bias = relative_bias(case, params, n)
    if case["kind"] in (*GATED, "mix"):
        bias = (mixed_bias if case["kind"] == "mix" else gate_bias)(case, params, n, x)
    scale = row_scale(case, params, n, visible)
    if bias is None:
        z = scale * c
    elif bias_inside(case):
        z = scale * (c + bias)
    else:
        z = scale * c + bias
    return jnp.where(visible[:, None], z, -jnp.inf)


def bias_inside(case):
    return case["kind"] in (*LEARNED, *GATED, "mix") and case["ssmax_prior"] == "inside" and "log_scale" not in case


def attention(case, params, n, x, start):
    def heads(name, count):
        y = x @ params[f"layers.{n}.attention.{name}.weight"].T
        return y.reshape(*x.shape[:2], count, case["head_size"]).transpose(0, 2, 1, 3)

    q, k, v = heads("wq", case["n_heads"]), heads("wk", case["n_kv_heads"]), heads("wv", case["n_kv_heads"])
    if case.get("qk_norm"):  # Henry et al. 2020
        q, k = (rmsnorm(y, params[f"layers.{n}.attention.{name}_norm.weight"], case["norm_eps"]) for y, name in ((q, "q"), (k, "k")))
    if case["kind"] == "rotary":
        q, k = rotate(q, case), rotate(k, case)
    group = [h * case["n_kv_heads"] // case["n_heads"] for h in range(case["n_heads"])]
    k, v = k[:, group], v[:, group]

    z = logits(case, params, n, x, q, k, visible_keys(case, start))
    if case.get("sinks"):  # a key without a value; gpt-oss (2025)
        sink = jnp.broadcast_to(params[f"layers.{n}.attention.sink"], (*z.shape[:3], 1))
        z = jnp.concatenate([z, sink], axis=-1)
    p = jax.nn.softmax(z, axis=-1)[..., : case["seq_len"]]
    out = jnp.einsum("bhij,bhjd->bihd", p, v).reshape(x.shape)
    if case.get("gated_attention"):  # Qiu et al. 2025
        out = out * jax.nn.sigmoid(x @ params[f"layers.{n}.attention.gate.weight"].T)
    return out @ params[f"layers.{n}.attention.wo.weight"].T


def rmsnorm(x, weight, eps):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def document_start(case, tokens):
    position = np.arange(tokens.shape[1])
    return np.maximum.accumulate(np.where(tokens == case["bos"], position, 0), axis=1)


def forward(case, params, tokens, attend=attention):
    """Logits [B,T,V]. attend: another implementation of attention, to check this one."""
    eps, start = case["norm_eps"], document_start(case, tokens)
    x = params["tok_embeddings.weight"][tokens]
    if case["kind"] == "sinusoidal":
        x = x + sinusoidal_embedding(case)
    if case["kind"] == "learned":  # Radford et al. 2019
        x = x + params["position_embeddings.weight"][: tokens.shape[1]]
    for n in range(case["n_layers"]):
        layer = f"layers.{n}."
        w1, w2, w3 = (params[f"{layer}feed_forward.{w}.weight"] for w in ("w1", "w2", "w3"))
        x = x + attend(layer_case(case, n), params, n, rmsnorm(x, params[layer + "attention_norm.weight"], eps), start)
        y = rmsnorm(x, params[layer + "ffn_norm.weight"], eps)
        x = x + (jax.nn.silu(y @ w1.T) * (y @ w3.T)) @ w2.T
    return cap(rmsnorm(x, params["norm.weight"], eps) @ params["output.weight"].T, case.get("final_softcap"))


def make_loss(case, tokens, targets):
    """Mean cross-entropy over all tokens, as a function of the parameters."""

    def loss(params):
        log_p = jax.nn.log_softmax(forward(case, params, tokens), axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_p, targets[:, :, None], axis=-1))

    return jax.jit(loss)


# ----------------------------------------------------------------------------
# The optimiser


def trainable(case, name):
    if name.endswith("seq_scale"):
        return not case["no_seq_scale"]
    leaf = name.rsplit(".", 1)[-1]
    return bool(case.get(leaf + "_trainable", 1))


def global_norm(case, grads):
    return math.sqrt(sum(float(np.sum(g * g)) for name, g in grads.items() if trainable(case, name)))


def direction(case, t, m, v):
    """The step per unit of learning rate from the moments after step t = 1, 2, ... AdamW: Loshchilov &
    Hutter 2019. RAdam: Liu et al. 2020, with PyTorch's placing of eps: beside sqrt(v), before bias correction."""
    correction1, correction2 = 1 - case["beta1"] ** t, 1 - case["beta2"] ** t
    if case["optimizer"] == "adamw":
        return (m / correction1) / (np.sqrt(v / correction2) + case["eps"])
    rho_inf = 2 / (1 - case["beta2"]) - 1
    rho = rho_inf - 2 * t * case["beta2"] ** t / correction2
    if rho <= 5:
        return m / correction1
    rect = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
    return rect * (m / correction1) * math.sqrt(correction2) / (np.sqrt(v) + case["eps"])


def train(case, params, value_and_grad):
    """Yields (loss, gradient norm, parameters after the update) at every step."""
    params = dict(params)
    moments = {name: (np.zeros_like(p), np.zeros_like(p)) for name, p in params.items()}
    for t in range(1, case["steps"] + 1):
        loss, grads = value_and_grad(params)
        norm = global_norm(case, grads)
        clip = min(1.0, case["grad_clip"] / (norm + 1e-6))
        for name in filter(lambda name: trainable(case, name), params):
            tables = name.endswith("attention.mixed")
            rate = case["prior_lr"] if "prior." in name or tables else case["learning_rate"]
            decay = case["weight_decay"] if params[name].ndim == 2 and not tables else 0.0  # decoupled; matrices only
            g, (m, v) = clip * np.asarray(grads[name]), moments[name]
            m = case["beta1"] * m + (1 - case["beta1"]) * g
            v = case["beta2"] * v + (1 - case["beta2"]) * g * g
            moments[name] = m, v
            params[name] = params[name] * (1 - rate * decay) - rate * direction(case, t, m, v)
        yield float(loss), norm, dict(params)


# ----------------------------------------------------------------------------
# Fixtures


def build(name):
    """(tensors, metadata) of one fixture, in float64, and what the checks need of it."""
    case, rng = configuration(name), np.random.RandomState(CASES[name].get("seed", 1000 + list(CASES).index(name)))
    weights = make_parameters(case, rng, name)
    tokens, targets = make_tokens(case, rng)
    params = {key: w.astype(np.float64) for key, w in weights.items()}
    value_and_grad = jax.jit(jax.value_and_grad(make_loss(case, tokens, targets)))
    loss, grads = value_and_grad(params)
    logits = jax.jit(lambda p: forward(case, p, tokens))(params)
    losses, norms, after = zip(*train(case, params, value_and_grad))

    tensors = dict(weights, tokens=tokens, targets=targets, logits=logits, loss=[loss], losses=losses)
    tensors |= dict({f"grad.{key}": g for key, g in grads.items()}, grad_norm=norms[:1], grad_norms=norms)
    for step in sorted({3, case["steps"]}):
        tensors |= {f"step{step}.{key}": p for key, p in after[step - 1].items()}
    tensors = {key: x if key in ("tokens", "targets") else np.array(x, np.float32) for key, x in tensors.items()}
    metadata = {key: f"{case[key]:.10g}" if isinstance(case[key], float) else str(case[key]) for key in case["options"]}
    return tensors, metadata, (case, params, tokens, targets, np.asarray(logits), grads)


def write(path, tensors, metadata):
    """The safetensors package leaves the metadata in arbitrary order: sort the header, same size, same file."""
    data = safetensors.numpy.save(tensors, metadata)
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


# ----------------------------------------------------------------------------
# Checks of the oracle itself


def naive_attention(case, params, n, x, start):
    """attention() once more, element by element over lists of visible keys: no masks, no broadcasting."""
    heads, group, size = case["n_heads"], case["n_heads"] // case["n_kv_heads"], case["head_size"]
    x, get = np.asarray(x), lambda key: np.asarray(params[f"layers.{n}.attention.{key}"])
    q, k, v = (x @ get(w + ".weight").T for w in ("wq", "wk", "wv"))
    prior = prior_prefix(case, n)
    out = np.zeros_like(x)
    window = case.get("window", case["seq_len"])
    if case.get("qk_norm"):
        for y, name in ((q, "q_norm.weight"), (k, "k_norm.weight")):
            for head in np.split(y.reshape(-1, y.shape[-1]), y.shape[-1] // size, axis=1):  # views of y
                head *= get(name) / np.sqrt((head**2).sum(axis=1, keepdims=True) / size + case["norm_eps"])

    def bias(h, d):
        theta = lambda name, row=0: float(params[prior + name][row, h, 0, 0])
        if case.get("alibi_slopes") == "geometric":
            return -d * 256.0 ** (-(h + 1) / heads)
        if case["kind"] == "kerple_log":
            return -math.exp(theta("kerple_log_scale")) * math.log1p(d * math.exp(theta("kerple_log_rate")))
        if case["kind"] == "kerple_power":
            return -math.exp(theta("kerple_power_scale")) * d ** (1 + math.tanh(theta("kerple_power_exponent") / 2))
        if case["kind"] == "alibi_learned":
            return -math.exp(theta("alibi_log_slope")) * d
        if case["kind"] == "sandwich":
            angles = [d * 10000.0 ** (-2 * i / case["sandwich_dim"]) for i in range(case["sandwich_dim"] // 2)]
            return sum(map(math.cos, angles)) * heads / (8 * h + 8)
        if case["kind"] == "t5":  # the first distances of buckets 16 to 31, written out
            first = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
            return theta("t5_bias", d if d < 16 else 15 + sum(d >= f for f in first))
        if case["kind"] == "table":
            return theta("table_bias", min(d, 511))
        if case["kind"] == "fire":
            row = lambda name, k, head=0: float(params[prior + name][k, head, 0, 0])
            c = math.exp(row("fire_scale", 0))
            x = math.log1p(c * d) / math.log1p(c * case["fire_length"])
            unit = lambda k: max(0.0, row("fire_hidden", k) * x + row("fire_hidden_bias", k))
            return sum(row("fire_output", k, h) * unit(k) for k in range(32))
        if case["kind"] == "alibi":  # the slopes of 4 heads, of 12 heads, written out
            return -d * (4.0 ** -(h + 1) if heads == 4 else 2.0 ** -(h + 1) if h < 8 else 2.0 ** -(h - 7.5))
        if case["kind"] != "bam":
            return 0.0
        alpha, beta, mu = (params[prior + "theta_" + key][0, h, 0, 0] for key in ("alpha", "beta", "mu"))
        return -math.exp(alpha + beta * math.log(abs(-d - 2 * math.sinh(mu)) + 1e-5))

    def mixed(b, i, h, d):
        if case["kind"] != "mix" or d >= case["mix_length"]:
            return 0.0
        rows = get("w_mix.weight")[h * case["mix_rank"] : (h + 1) * case["mix_rank"]]
        return sum(float(row @ x[b, i]) * float(table[d]) for row, table in zip(rows, get("mixed")))

    gates = x @ get("forget.weight").T + get("forget.bias") if case["kind"] in GATED else None
    decay = lambda gate: -math.log1p(math.exp(-gate if case["kind"] == "fox" else gate))

    def speed(m):
        """Radians per position of pair m, by how often it turns in the original length."""
        width, kind, original = rotated_width(case), case.get("rope_scaling", "none"), case.get("rope_original_length")
        full = lambda pair: case["rope_theta"] ** (-2 * pair / width)
        often = lambda pair: original * full(pair) / (2 * math.pi)
        if kind == "none":
            return full(m)
        slow = full(m) / case["rope_factor"]
        if kind == "ntk":  # the first pair as before, the last one slowed down, geometric in between
            return full(m) * case["rope_factor"] ** (-m / (width / 2 - 1))
        if kind == "linear":
            return slow
        if kind == "yarn":
            fast, late = case.get("rope_beta_fast", 32), case.get("rope_beta_slow", 1)
            first = max((pair for pair in range(width) if often(pair) >= fast), default=0)
            last = min((pair for pair in range(width) if often(pair) <= late), default=width - 1)
            share = min(max((m - first) / (last - first), 0), 1)
            return full(m) + share * (slow - full(m))
        share = min(max((often(m) - 1) / (4 - 1), 0), 1)
        return slow + share * (full(m) - slow)

    def turn(vector, position):
        result, factor = vector.copy(), 1.0
        if case.get("rope_scaling") == "yarn":
            factor = case.get("rope_attention_factor", math.log(case["rope_factor"]) / 10 + 1)
        for m in range(rotated_width(case) // 2 if case["kind"] == "rotary" else 0):
            angle, (x, y) = position * speed(m), factor * vector[2 * m : 2 * m + 2]
            result[2 * m] = x * math.cos(angle) - y * math.sin(angle)
            result[2 * m + 1] = x * math.sin(angle) + y * math.cos(angle)
        return result

    for b, i, h in np.ndindex(x.shape[0], x.shape[1], heads):
        keys = [j for j in range(i + 1) if j >= start[b, i] and i - j < window]
        columns, kv_columns = (slice(head * size, (head + 1) * size) for head in (h, h // group))
        query = turn(q[b, i, columns], i)
        g = get("seq_scale")[0, h, 0, 0] * math.log(len(keys)) if case["ssmax"] else 1.0
        if "log_scale" in case:
            first, slope = map(float, case["log_scale"].split(","))
            g = 1 + slope * max(0.0, math.log(len(keys) / first))
        z = []
        for j in keys:
            a = float(query @ turn(k[b, j, kv_columns], j)) / size**0.5
            if "softcap" in case:
                a = case["softcap"] * (1 - 2 / (math.exp(2 * a / case["softcap"]) + 1))
            p_ij = bias(h, i - j) + mixed(b, i, h, i - j)
            if gates is not None:
                p_ij = sum(decay(gates[b, l, h]) for l in range(j + 1, i + 1))
            z.append(g * (a + p_ij) if bias_inside(case) else g * a + p_ij)
        p = [math.exp(y - max(z)) for y in z]
        total = sum(p) + (math.exp(get("sink")[0, h, 0, 0] - max(z)) if case.get("sinks") else 0)
        for j, weight in zip(keys, p):
            out[b, i, columns] += weight / total * v[b, j, kv_columns]
    if case.get("gated_attention"):
        out /= 1 + np.exp(-x @ get("gate.weight").T)
    return out @ get("wo.weight").T


def verify(case, params, tokens, targets, logits, grads):
    """Relative errors: of the logits against naive_attention; the largest of a gradient against differences of
    fourth order along a random direction; the same for theta_mu = 0, a kink rounded off below 1e-5 only."""
    naive = np.asarray(forward(case, params, tokens, naive_attention))
    loss, rng, errors = make_loss(case, tokens, targets), np.random.RandomState(7), {False: [0.0], True: [0.0]}
    for name, grad in grads.items():
        kink = name.endswith("theta_mu") and not np.any(params[name])
        u, h = rng.standard_normal(grad.shape), 1e-9 if kink else 1e-4
        f = [float(loss(params | {name: params[name] + step * h * u})) for step in (-2, -1, 1, 2)]
        slope = (8 * (f[2] - f[1]) - (f[3] - f[0])) / (12 * h)
        errors[kink].append(abs(slope - np.sum(grad * u)) / np.linalg.norm(grad))
    return np.max(np.abs(naive - logits)) / np.max(np.abs(logits)), max(errors[False]), max(errors[True])


def compare(path, tensors, metadata):
    """Names of what differs from the file: more than the last bit of a float32, or any input."""
    with safetensors.safe_open(path, "numpy") as file:
        stored, found = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()
    wrong = [] if found == metadata else ["__metadata__"]
    wrong += sorted(stored.keys() ^ tensors.keys())
    for key in stored.keys() & tensors.keys():
        a, b = stored[key], tensors[key]
        if a.shape != b.shape or a.dtype != b.dtype or not np.allclose(a, b, rtol=2.5e-7, atol=1e-12):
            wrong.append(key)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "test/fixtures")
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in CASES:
        tensors, metadata, rest = build(name)
        losses, norms, path = tensors["losses"], tensors["grad_norms"], args.out / f"{name}.safetensors"
        print(f"{name:20s} ln V {math.log(rest[0]['vocab_size']):.2f}, loss {losses[0]:.3f} -> ", end="")
        print(f"{losses[-1]:.3f}, norm {norms[0]:.3f} -> {norms[-1]:.3f} (clip {metadata['grad_clip']})", end="")
        if args.check:
            wrong = compare(path, tensors, metadata) if path.exists() else ["no such file"]
            errors = verify(*rest)
            if not all(error < limit for error, limit in zip(errors, (1e-12, 1e-6, 1e-2))):
                wrong.append("the oracle disagrees with itself")
            failed |= bool(wrong)
            print(", errors {:.0e} {:.0e} {:.0e}: ".format(*errors), f"{path}: {wrong}" if wrong else "ok", flush=True)
        else:
            write(path, tensors, metadata)
            print(f", {path.stat().st_size // 1024} KB", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
