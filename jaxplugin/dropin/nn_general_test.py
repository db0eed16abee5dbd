# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`scaled_dot_general` and its gradients, against NumPy in f64."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax

from jaxplugin import nn
from jaxplugin.core import formats
from jaxplugin.testing import contract, nn_cases
from jaxplugin.testing.oracles import quantization_oracle

BF16, F16, F32 = contract.BF16, contract.F16, contract.F32
rng_of = nn_cases.rng_of
E5M2 = formats.E5M2

# An f32 product of unquantized numbers: n terms, each product and each sum
# rounded once, in any order, are within n * 2^-24 * sum|a * b|.
F32_ROUNDING = 2.0**-24

E4M3_MAX, E2M1_MAX = 448.0, 6.0
SIZES = {"a": 2, "b": 3, "k": 40, "l": 3, "m": 5, "n": 7, "p": 2, "q": 3}
MODES = ("mxfp8", "mxfp4", "nvfp4")
GLOBAL_SCALE = 2.0**-9

EINSUMS = (
  "bmk,bnk->bmn",
  "mk,kn->mn",
  "kmb,bkn->bmn",
  "abmk,bank->bamn",  # batch dimensions not in the order of lhs
  "mkl,lnk->mn",  # two contracting dimensions, in another order in rhs
  "mpk,qkn->mpqn",
  "mk,k->m",  # an operand's gradient is an outer product
  "k,k->",
  "bm,bn->bmn",  # nothing is contracted
)
# name, einsum, mode, dtypes of lhs, of rhs and of the result.
DOT_GENERAL_CASES = tuple(
  (f"{names}_{mode}", names, mode, dtypes)
  for (names, mode), dtypes in zip(
    (
      *itertools.product(EINSUMS, ("mxfp8", "nvfp4")),
      *itertools.product((EINSUMS[2], EINSUMS[4]), ("mxfp4",)),
    ),
    itertools.cycle(
      ((F32, F32, F32), (BF16, BF16, BF16), (F16, BF16, F32), (BF16, F32, F16))
    ),
  )
)


def quantize(x, mode, global_scale=None, dtype=None):
  """f64 values of `x`, blocked along its last axis and padded."""
  format = formats.by_name("mxfp8_e5m2" if dtype == E5M2 else mode)
  size = x.shape[-1]
  widths = [(0, 0)] * (x.ndim - 1) + [(0, -size % format.block_size)]
  x = np.pad(np.asarray(x, np.float32), widths)
  return quantization_oracle.rounded_to(x, format, global_scale)[..., :size]


def product(lhs, rhs, names, quantize_lhs, quantize_rhs):
  """f64 einsum of quantized operands, and of their magnitudes.

  Quantization is along the contracted letters, in the order of lhs, as one.
  `names` is an einsum like "bmk,bnk->bmn".
  """
  (lhs_names, rhs_names), out = split(names)
  batch = [c for c in lhs_names if c in rhs_names and c in out]
  contracted = [c for c in lhs_names if c in rhs_names and c not in out]

  def flat(x, own, quantize):
    free = [c for c in own if c not in batch and c not in contracted]
    order = "".join(batch + free + contracted)
    x = np.einsum(f"{''.join(own)}->{order}", np.asarray(x, np.float64))
    lead = x.shape[: len(batch) + len(free)]
    x = quantize(x.reshape(*lead, math.prod(x.shape[len(lead) :])))
    return x, "".join(batch + free)

  lhs, lhs_lead = flat(lhs, lhs_names, quantize_lhs)
  rhs, rhs_lead = flat(rhs, rhs_names, quantize_rhs)
  equation = f"{lhs_lead}Z,{rhs_lead}Z->{out}"
  return (
    np.einsum(equation, lhs, rhs),
    np.einsum(equation, np.abs(lhs), np.abs(rhs)),
  )


def split(names):
  operands, out = names.split("->")
  return operands.split(","), out


def numbers_of(names):
  """`lax.dot_general`'s dimension numbers of an einsum."""
  (lhs, rhs), out = split(names)
  batch = [c for c in out if c in lhs and c in rhs]
  contracted = [c for c in lhs if c in rhs and c not in out]
  dims = lambda own, letters: tuple(own.index(c) for c in letters)
  return (
    (dims(lhs, contracted), dims(rhs, contracted)),
    (dims(lhs, batch), dims(rhs, batch)),
  )


def floats(seed, names, dtype=np.float32):
  shape = tuple(SIZES[c] for c in names)
  return rng_of(seed).normal(size=shape).astype(dtype)


def config(mode, global_scale=GLOBAL_SCALE):
  if mode != "nvfp4":
    return nn.get_scaled_dot_general_config(mode)
  return nn.get_scaled_dot_general_config(mode, jnp.float32(global_scale))


def quantizer(mode, global_scale=GLOBAL_SCALE, dtype=None):
  return lambda x: quantize(x, mode, global_scale, dtype)


def assert_product(
  actual, lhs, rhs, quantize_lhs, quantize_rhs=None, names="mk,nk->mn"
):
  """Checks an f32 result; `quantize_rhs` is `quantize_lhs` by default."""
  exact, magnitude = product(
    lhs, rhs, names, quantize_lhs, quantize_rhs or quantize_lhs
  )
  bound = contract.DOT_BOUND * magnitude
  contract.assert_within(actual, exact, bound, contract.F32)


def dot(lhs, rhs, configs, names="mk,nk->mn", module=nn, **options):
  """Calls `module.scaled_dot_general` with the numbers of an einsum."""
  return module.scaled_dot_general(
    lhs, rhs, numbers_of(names), configs=configs, **options
  )


def dot_and_gradients(lhs, rhs, configs, *args, g=None, **options):
  """Returns the result of `dot`, and gradients for `g` or for the result."""
  function = lambda lhs, rhs: dot(lhs, rhs, configs, *args, **options)
  out, vjp = jax.vjp(function, lhs, rhs)
  return out, *vjp(out if g is None else g)


def expected_results(names, mode, arrays, global_scales):
  """f64 (exact, bound) of `scaled_dot_general` and of both gradients.

  Args:
    names: the einsum.
    mode: that of all three configs.
    arrays: lhs, rhs and the gradient of the result.
    global_scales: of lhs and of rhs.
  """
  lhs, rhs, g = arrays
  (lhs_names, rhs_names), out = split(names)
  q_lhs, q_rhs = (quantizer(mode, scale) for scale in global_scales)
  exact, magnitude = product(lhs, rhs, names, q_lhs, q_rhs)
  results = [(exact, contract.DOT_BOUND * magnitude)]
  for x, scale, other, q_other, equation in (
    (lhs, global_scales[0], rhs, q_rhs, f"{out},{rhs_names}->{lhs_names}"),
    (rhs, global_scales[1], lhs, q_lhs, f"{out},{lhs_names}->{rhs_names}"),
  ):
    if mode != "nvfp4":
      exact, magnitude = product(g, other, equation, quantizer(mode), q_other)
      results.append((exact, contract.DOT_BOUND * magnitude))
      continue
    # In high precision, and zero where x was clipped.
    same = lambda x: x
    exact, magnitude = product(g, other, equation, same, same)
    passes = np.abs(x.astype(np.float64)) <= scale * E2M1_MAX * E4M3_MAX
    num_terms = min(g.size, other.size)
    results.append(
      (exact * passes, num_terms * F32_ROUNDING * magnitude * passes)
    )
  return results


class ScaledDotGeneralTest(parameterized.TestCase):
  @parameterized.named_parameters(*DOT_GENERAL_CASES)
  @pytest.mark.full
  def test_result_and_gradients_are_those_of_f64(self, names, mode, dtypes):
    (lhs_names, rhs_names), out = split(names)
    lhs = floats(50, lhs_names, dtypes[0])
    rhs = floats(51, rhs_names, dtypes[1])
    g = floats(52, out, dtypes[2])
    lhs_scale, rhs_scale = 2.0**-12, 2.0**-11  # clip above 0.65625 and 1.3125
    configs = [config(mode, lhs_scale), config(mode, rhs_scale), config(mode)]

    f = functools.partial(
      dot_and_gradients,
      configs=configs,
      names=names,
      preferred_element_type=dtypes[2],
    )
    results = jax.jit(lambda lhs, rhs, g: f(lhs, rhs, g=g))(lhs, rhs, g)
    expected = expected_results(
      names, mode, (lhs, rhs, g), (lhs_scale, rhs_scale)
    )
    if mode == "nvfp4":  # some are clipped and some are not
      for gradient, _ in expected[1:]:
        self.assertBetween((gradient == 0).mean(), 0.05, 0.95)
    for actual, (exact, bound), dtype in zip(
      results, expected, (dtypes[2], *dtypes[:2]), strict=True
    ):
      contract.assert_within(actual, exact, bound, dtype)

  def test_the_mask_passes_the_limit_and_stops_the_next_number(self):
    scale = np.float32(0.3)
    limit = scale * np.float32(E2M1_MAX) * np.float32(E4M3_MAX)
    above = np.nextafter(limit, np.float32(np.inf))
    row = np.array([limit, above, -limit, -above, np.nan, 1], np.float32)
    x = jnp.asarray(np.tile(row, (1, 3)))
    configs = [config("nvfp4", scale)] * 3

    def loss(x):
      out = dot(x, jnp.ones_like(x), configs)
      return jnp.where(jnp.isnan(out), 0, out).sum() + out.sum()

    gradient = jax.jit(jax.grad(loss))(x)
    np.testing.assert_array_equal(
      gradient != 0, np.tile([True, False, True, False, False, True], (1, 3))
    )

  @pytest.mark.full
  def test_mixed_formats_share_a_product(self):
    lhs, rhs, g = floats(58, "mk"), floats(59, "nk"), floats(60, "mn")
    gradient_config = dataclasses.replace(
      nn.get_scaled_dot_general_config("mxfp8"), data_type=jnp.float8_e5m2
    )
    configs = [config("nvfp4"), config("mxfp8"), gradient_config]

    results = dot_and_gradients(lhs, rhs, configs, g=jnp.asarray(g))
    nvfp4, mxfp8 = quantizer("nvfp4"), quantizer("mxfp8")
    as_gradient = quantizer("mxfp8", dtype=formats.E5M2)
    assert_product(results[0], lhs, rhs, nvfp4, mxfp8)
    assert_product(results[1], g, rhs, as_gradient, mxfp8, "mn,nk->mk")
    assert_product(results[2], g, lhs, as_gradient, nvfp4, "mn,mk->nk")

  def test_other_block_sizes_are_served(self):
    lhs, rhs = floats(61, "mk"), floats(62, "nk")
    half = dataclasses.replace(config("mxfp8"), block_size=16)

    def in_halves(x):
      x = np.pad(x, [(0, 0), (0, -x.shape[1] % 16)])
      return np.concatenate(
        [quantize(part, "mxfp8") for part in np.split(x, x.shape[1] // 16, 1)],
        1,
      )

    assert_product(dot(lhs, rhs, [half] * 3), lhs, rhs, in_halves)

  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.sample(1)
  def test_the_order_of_contracting_pairs_changes_no_bit(self, mode):
    @functools.partial(jax.jit, static_argnums=0)
    def f(numbers, lhs, rhs):
      g = lambda lhs, rhs: nn.scaled_dot_general(
        lhs, rhs, numbers, configs=[config(mode)] * 3
      )
      out, vjp = jax.vjp(g, lhs, rhs)
      return out, *vjp(out)

    first, second = (
      f((contracting, ((), ())), floats(65, "mkl"), floats(66, "lnk"))
      for contracting in (((1, 2), (2, 0)), ((2, 1), (0, 2)))
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)

  def test_without_configs_it_is_dot_general(self):
    lhs, rhs = floats(67, "bmk"), floats(68, "bnk")
    numbers = numbers_of("bmk,bnk->bmn")
    for dtype in (np.float32, jnp.bfloat16, None):
      np.testing.assert_array_equal(
        nn.scaled_dot_general(lhs, rhs, numbers, preferred_element_type=dtype),
        lax.dot_general(lhs, rhs, numbers, preferred_element_type=dtype),
        strict=True,
      )
    jaxs = jax.nn.scaled_dot_general(lhs, rhs, numbers)
    np.testing.assert_array_equal(
      nn.scaled_dot_general(lhs, rhs, numbers), jaxs, strict=True
    )

  @parameterized.parameters((), (1,))
  @pytest.mark.sample(1)
  def test_a_traced_global_scale_has_a_zero_gradient(self, *shape):
    lhs, rhs = floats(71, "mk"), floats(72, "nk")

    @jax.jit
    def f(lhs, rhs, scale):
      configs = [nn.get_scaled_dot_general_config("nvfp4", scale)] * 3
      return dot(lhs, rhs, configs)

    scale = jnp.full(shape, GLOBAL_SCALE, jnp.float32)
    out, vjp = jax.vjp(f, lhs, rhs, scale)
    assert_product(out, lhs, rhs, quantizer("nvfp4"))
    np.testing.assert_array_equal(
      vjp(out)[2], np.zeros(shape, np.float32), strict=True
    )

  def test_the_global_scale_may_be_state_that_training_updates(self):
    rhs = floats(73, "nk")

    def step(scale, lhs):
      configs = [nn.get_scaled_dot_general_config("nvfp4", scale)] * 3
      gradient = jax.grad(lambda x: dot(x, rhs, configs).sum())(lhs)
      return jnp.max(jnp.abs(lhs)).reshape(1) / (E2M1_MAX * E4M3_MAX), gradient

    steps = jnp.stack([floats(74, "mk"), floats(75, "mk"), floats(76, "mk")])
    first = jnp.array([1.0], jnp.float32)
    final, gradients = jax.lax.scan(step, first, steps)
    scale = first
    for lhs, gradient in zip(steps, gradients, strict=True):
      limit = np.float32(scale[0]) * np.float32(6) * np.float32(448)
      passes = np.abs(np.asarray(lhs)) <= limit
      expected = np.where(passes, rhs.astype(np.float64).sum(0), 0)
      bound = SIZES["n"] * F32_ROUNDING * np.abs(rhs).sum(0) * passes
      contract.assert_within(gradient, expected, bound, F32)
      scale = jnp.max(jnp.abs(lhs)).reshape(1) / (E2M1_MAX * E4M3_MAX)
    np.testing.assert_array_equal(final, scale)

  @parameterized.parameters(*MODES)
  @pytest.mark.sample(1)
  def test_integers_are_multiplied_as_floats(self, mode):
    values = rng_of(77).integers(-9, 10, (2, 5, 40))
    lhs, rhs = values.astype(np.int32)
    assert_product(dot(lhs, rhs, [config(mode)] * 3), lhs, rhs, quantizer(mode))

  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.full
  def test_gradients_inside_shard_map_are_summed_over_the_devices(self, mode):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    # One row a device: what is summed is the same with and without devices,
    # but for mxfp8, whose blocks of rows then are a device's own.
    lhs = jnp.asarray(rng_of(82).normal(size=(4, 40)), jnp.float32)
    rhs = jnp.asarray(floats(83, "nk"))
    configs = [config(mode, 2.0)] * 3

    def loss(lhs, rhs):
      return dot(lhs, rhs, configs).sum()

    def mapped(lhs, rhs):
      return jax.shard_map(
        lambda lhs, rhs: lax.psum(loss(lhs, rhs), "x"),
        mesh=mesh,
        in_specs=(jax.P("x"), jax.P()),
        out_specs=jax.P(),
      )(lhs, rhs)

    gradients = jax.jit(jax.grad(mapped, (0, 1)))(lhs, rhs)
    rows = [jax.grad(loss, (0, 1))(lhs[i : i + 1], rhs) for i in range(4)]
    np.testing.assert_array_equal(
      gradients[0], jnp.concatenate([row[0] for row in rows])
    )
    # A sum of 4, in an order of the devices' choosing.
    parts = np.stack([np.asarray(row[1], np.float64) for row in rows])
    bound = 4 * F32_ROUNDING * np.abs(parts).sum(0)
    contract.assert_within(gradients[1], parts.sum(0), bound, F32)

  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.full
  def test_every_size_may_be_symbolic(self, mode):
    m, k = jax.export.symbolic_shape("m, k")
    exported = jax.export.export(
      jax.jit(lambda x, y: dot(x, y, [config(mode)] * 2))
    )(
      jax.ShapeDtypeStruct((m, k), jnp.float32),
      jax.ShapeDtypeStruct((7, k), jnp.float32),
    )
    lhs, rhs = floats(84, "mk"), floats(85, "nk")
    assert_product(exported.call(lhs, rhs), lhs, rhs, quantizer(mode))

  def test_two_configs_serve_inference_and_refuse_training(self):
    configs = [config("mxfp8")] * 2
    lhs, rhs = floats(80, "mk"), floats(81, "nk")
    f = lambda x: dot(x, rhs, configs).sum()
    with self.assertRaisesRegex(ValueError, "gradient, got two configs"):
      jax.grad(f)(lhs)

  @pytest.mark.full
  def test_the_implementation_reaches_the_gradient(self):
    configs = [nn.get_scaled_dot_general_config("mxfp8")] * 3
    x = jnp.ones((3, 32))

    def loss(x, w):
      return dot(x, w, configs, implementation="xla").sum()

    found = nn_cases.bound_configs(jax.grad(loss, (0, 1)), x, x)
    self.assertEqual([c.implementation for c in found], ["xla"] * 3)


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(*MODES)
  def test_fields_are_those_of_jax(self, mode):
    if mode == "mxfp4" and nn_cases.JAX_VERSION < (0, 11):
      self.skipTest(f"jax {jax.__version__} has no mode mxfp4")
    for args in ((mode,), (mode, jnp.array([0.5], jnp.float32))):
      if mode == "mxfp4" and len(args) == 2:
        continue
      ours = nn.get_scaled_dot_general_config(*args)
      jaxs = jax.nn.get_scaled_dot_general_config(*args)
      self.assertEqual(
        [f.name for f in dataclasses.fields(ours)],
        [f.name for f in dataclasses.fields(jaxs)],
      )
      for name in ("mode", "block_size", "infer_only"):
        self.assertEqual(getattr(ours, name), getattr(jaxs, name))
      for name in ("data_type", "scale_type"):
        self.assertEqual(
          jnp.dtype(getattr(ours, name)), jnp.dtype(getattr(jaxs, name))
        )
      if jaxs.global_scale is None:
        self.assertIsNone(ours.global_scale)
      else:
        np.testing.assert_array_equal(
          ours.global_scale, jaxs.global_scale, strict=True
        )

  def test_an_unknown_mode_lists_the_known_ones(self):
    with self.assertRaisesRegex(ValueError, "mxfp8, mxfp4, nvfp4, got 'fp8'"):
      nn.get_scaled_dot_general_config("fp8")

  def test_mxfp4_refuses_a_global_scale(self):
    with self.assertRaisesRegex(ValueError, "mxfp4 has no global scale"):
      nn.get_scaled_dot_general_config("mxfp4", jnp.float32(0.5))

  @parameterized.parameters("mxfp8", "nvfp4")
  @pytest.mark.full
  def test_configs_of_jax_give_the_same_bits(self, mode):
    lhs, rhs = floats(40, "bmk"), floats(41, "bnk")
    scale = jnp.array([0.5], jnp.float32)
    results = []
    for module in (nn, jax.nn):
      configs = [module.get_scaled_dot_general_config(mode, scale)] * 3
      results.append(dot_and_gradients(lhs, rhs, configs, "bmk,bnk->bmn"))
    jax.tree.map(np.testing.assert_array_equal, *results)

  def test_a_config_is_an_argument_of_a_jitted_function(self):
    lhs, rhs = floats(42, "mk"), floats(43, "nk")
    configs = [config("nvfp4", 0.25)] * 3
    assert_product(
      *(jax.jit(dot)(lhs, rhs, configs), lhs, rhs), quantizer("nvfp4", 0.25)
    )
