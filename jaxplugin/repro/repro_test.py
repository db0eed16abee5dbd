# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A replay names the first wrong call; files have nothing else than asked."""

import contextlib
import dataclasses
import json
import pathlib
import socket
import sys
import tempfile
import threading
import zipfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.extend import core as extend_core
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplugin as jp
from jaxplugin.dot import backends
from jaxplugin.operation import failures, repro_files
from jaxplugin.quantization import backends as quantization_backends
from jaxplugin.quantization import problems
from jaxplugin.ragged import backends as ragged_backends
from jaxplugin.repro import oracle, replaying
from jaxplugin.runtime import cpu_library
from jaxplugin.testing import command_lines

RNG = np.random.default_rng(5)
MARKER = "zanzibar"
SECRET = np.float32(-1.2345678)
TABLES = {
  "dot": (backends.BACKENDS, "cpu"),
  "quantize": (quantization_backends.QUANTIZE, "cpu"),
  "dequantize": (quantization_backends.DEQUANTIZE, "cpu"),
  "ragged": (ragged_backends.BACKENDS, "cpu"),
}


def normal(*shape):
  return RNG.normal(size=shape).astype(np.float32)


WEIGHTS = jp.quantize(normal(3, 64, 64), "mxfp8")
EXPERTS = jp.quantize(normal(4, 64, 64), "nvfp4")


def zanzibar(x, w, sizes):
  """Seven calls: 1 before a scan with 1, and 5 after it."""
  with jax.named_scope("zanzibar_scope"):
    h = jax.jit(lambda zanzibar_x: jp.linear(zanzibar_x, WEIGHTS[0]))(x)

    def layer(h, zanzibar_w):
      return jnp.tanh(jp.linear(h, zanzibar_w)), None

    h, _ = jax.lax.scan(layer, h, WEIGHTS)
  w_q = jp.quantize(w, "nvfp4")
  y = jp.block_scaled_dot(jp.quantize(h, "nvfp4"), w_q, activation="silu")
  z = jp.ragged_dot(h, EXPERTS, sizes, activation="swiglu")
  return {"zanzibar_key": (y, z, jp.dequantize(w_q, jnp.float32))}


X = normal(9, 64)
X[2, 3] = SECRET
ARGS = (X, normal(33, 64), np.array([4, 0, 2, 3], np.int32))
# (operation, number of the call) in the order of the program.
DOT, LAYER, QUANTIZE, QUANTIZE_2, DOT_2, RAGGED, DEQUANTIZE = range(7)


@contextlib.contextmanager
def planted(operation, change, is_meant=lambda _: True, with_offset=False):
  """Makes the cpu implementation of an operation wrong.

  `change` gets a result and the call, and `is_meant` the problem.
  """
  table, name = TABLES[operation]
  right = table[name]

  def emit(*args, **options):
    results = right.emit(*args, **options)
    if not is_meant(args[-2]) or (with_offset and "offset" not in options):
      return results
    if isinstance(results, (list, tuple)):
      return [change(results[0], args[0]), *results[1:]]
    return change(results, args[0])

  jax.clear_caches()
  with mock.patch.dict(table, {name: dataclasses.replace(right, emit=emit)}):
    yield
  jax.clear_caches()


class ReproTestCase(command_lines.CommandLineTestCase):
  def setUp(self):
    super().setUp()
    self.path = str(self.directory / "a.zip")

  def archive(self, members):
    path = self.directory / "other.zip"
    with zipfile.ZipFile(path, "w") as archive:
      for member, data in members.items():
        archive.writestr(member, data)
    return path


class BisectTest(ReproTestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.file = pathlib.Path(folder) / "seven.zip"
    jp.repro.save(cls.file, zanzibar, *ARGS)

  def test_correct_program_has_no_wrong_call(self):
    found = jp.repro.replay(self.file)
    self.assertIsNone(found.first_wrong, str(found))
    self.assertLen(found.calls, 7)
    for call in found.calls:
      names = [x.implementation for x in call.comparisons]
      self.assertContainsSubset(["cpu", "xla"], names)
    self.assertIn("seed 0", str(found))
    self.assertRegex(
      found.program, r"differ .* by \d(\.\d)?e-0[5-9] of|by 0 of"
    )

  def test_wrong_calls_are_named(self):
    def wrong(x, _):
      return x.at[(0,) * x.ndim].set(jnp.asarray(1e3, x.dtype))

    flipped = lambda x, _: x.at[0, 0].set(x[0, 0] ^ 1)

    def fail(*_):
      raise RuntimeError("planted")

    for faults, expected in (
      (
        (
          ("dot", wrong, lambda problem: problem.n == 64),
          ("quantize", flipped, lambda problem: problem.shape == (9, 64)),
          ("ragged", wrong),
        ),
        [DOT, LAYER, QUANTIZE_2, RAGGED],
      ),
      (
        (
          ("dot", wrong, lambda problem: problem.n == 33),
          ("quantize", flipped, lambda problem: problem.shape == (33, 64)),
          ("dequantize", wrong),
          ("ragged", fail),
        ),
        [QUANTIZE, DOT_2, RAGGED, DEQUANTIZE],
      ),
    ):
      with contextlib.ExitStack() as stack:
        for fault in faults:
          stack.enter_context(planted(*fault))
        found = jp.repro.replay(self.file)
      is_wrong = [i for i, call in enumerate(found.calls) if call.is_wrong]
      self.assertEqual(is_wrong, expected, str(found))
      self.assertEqual(found.first_wrong, expected[0])
      self.assertIn(f"The first wrong call is {expected[0]}.", str(found))
      for number in expected:
        results = {x.implementation: x for x in found.calls[number].comparisons}
        self.assertTrue(results["cpu"].is_wrong)
        self.assertFalse(results["xla"].is_wrong)
        self.assertRegex(
          results["cpu"].text,
          r"at \[0, 0\]: got|result 0 at \[0, 0\]|RuntimeError: planted",
        )
    # An error of an implementation is its comparison.
    self.assertIn("cpu: WRONG, RuntimeError: planted", str(found))

  def test_wrong_prologue_is_named(self):
    def producers(x):
      y, total = jp.nn.rms_norm(x, x[0], residual=x, out_format="mxfp8")
      out = jp.OutFormat("nvfp4", global_scale=0.01)
      return y, total, jp.nn.silu_and_mul(total, out_format=out)

    jp.repro.save(self.path, producers, normal(9, 64))
    found = jp.repro.replay(self.path)
    self.assertIsNone(found.first_wrong, str(found))
    self.assertLen(found.calls, 2)
    is_norm = lambda problem: problem.shape == (9, 64)
    for bit, wrong in ((0x01, None), (0x80, 0)):  # the next code; the sign

      def change(x, _, bit=bit):
        codes = x.view(jnp.uint8)
        is_nan_next = codes & 0x7F == 0x7E
        return jnp.where(is_nan_next, codes, codes ^ bit).view(x.dtype)

      with self.subTest(bit), planted("quantize", change, is_norm):
        found = jp.repro.replay(self.path)
        self.assertEqual(found.first_wrong, wrong, str(found))

  def test_command_prints_the_call_and_its_status_says_wrong(self):
    def function(x):
      return jp.dequantize(jp.quantize(x, "mxfp8"), jnp.float32)

    jp.repro.save(self.path, function, X)
    status, out, _ = self.run_command("repro", self.path)
    self.assertEqual(status, 0)
    self.assertIn("No call of 2 is wrong.", out)
    with planted("dequantize", lambda x, _: x + 1):
      status, out, _ = self.run_command("repro", self.path, "--seed=4")
    self.assertEqual(status, 1)
    self.assertIn("seed 4", out)
    self.assertIn("The first wrong call is 1.", out)

  def test_names_and_data_are_not_in_the_file(self):
    everything = b"".join(members(self.file).values())
    self.assertNotIn(MARKER.encode(), everything)
    self.assertNotIn(b".py", everything)
    self.assertNotIn(SECRET.tobytes(), everything)
    self.assertNotIn(b"1.23456", everything)
    for constant in (WEIGHTS, EXPERTS):
      self.assertNotIn(np.asarray(constant.values).tobytes()[:64], everything)
    for name in (pathlib.Path(jp.__file__).parent, socket.gethostname()):
      self.assertNotIn(str(name).encode(), everything)

  def test_equal_programs_give_equal_bytes(self):
    jp.repro.save(self.path, zanzibar, *ARGS)
    self.assertEqual(
      pathlib.Path(self.path).read_bytes(), self.file.read_bytes()
    )

  def test_damaged_files_are_refused(self):
    data = self.file.read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
      path = self.write("short.zip", data[:size])
      with self.assertRaisesRegex(jp.repro.ReproError, "short.zip: it is dam"):
        jp.repro.replay(path)
      status, _, err = self.run_command("repro", path)
      self.assertEqual((status, err[:7]), (2, "error: "))
    with self.assertRaisesRegex(jp.repro.ReproError, "null: .* regular file"):
      jp.repro.replay("/dev/null")

  @parameterized.parameters(
    ("version", 3, "it has version 3, and this jaxplugin reads 2"),
    ("format", "other", "not a file of jp.repro.save"),
  )
  def test_other_versions_are_refused(self, name, value, message):
    found = members(self.file)
    manifest = json.loads(found["manifest.json"])
    found["manifest.json"] = json.dumps(manifest | {name: value}).encode()
    path = self.archive(found)
    with self.assertRaisesRegex(jp.repro.ReproError, message):
      jp.repro.replay(path)

  def test_encrypted_files_and_other_compressions_are_refused(self):
    data = self.file.read_bytes()
    begin = data.rindex(b"PK\x01\x02")  # of the last member's entry
    for offset, message in ((8, "it is encrypted"), (10, "it is damaged")):
      changed = bytearray(data)
      changed[begin + offset] |= 1
      path = self.write("changed.zip", bytes(changed))
      with self.assertRaisesRegex(jp.repro.ReproError, f"{path}: {message}"):
        jp.repro.replay(path)

  def test_damaged_content_is_refused_with_the_path(self):
    def change(part, **fields):
      found = members(self.file)
      manifest = json.loads(found["manifest.json"])
      part(manifest).update(fields)
      return found | {"manifest.json": json.dumps(manifest).encode()}

    call = lambda manifest: manifest["calls"][0]
    form = lambda manifest: call(manifest)["form"]
    array = lambda manifest: manifest["inputs"][0]
    program = members(self.file)["program"][:100]
    for found, message in (
      (change(call, operands=[99] * 3), "it is damaged"),
      (change(call, loops=[5] * 3), "it is damaged"),
      (change(call, operation="other"), "there is no operation other"),
      (change(form, rhs=-1), "it is damaged"),
      (change(array, shape=[7, 7]), "the inputs of its manifest differ from"),
      (change(array, statistics={"a": 1}), "it is damaged"),
      (members(self.file) | {"program": program}, "the program cannot be read"),
    ):
      with self.assertRaisesRegex(jp.repro.ReproError, f"other.zip: {message}"):
        jp.repro.replay(self.archive(found))

  def test_calls_whose_results_are_unused_are_not_compared(self):
    def function(x):
      jp.quantize(x, "mxfp8")
      return jp.linear(x, WEIGHTS[0])

    jp.repro.save(self.path, function, X)
    (call,) = repro_files.read(pathlib.Path(self.path)).calls
    self.assertEqual(call.operation, "block_scaled_dot")

  def test_unknown_field_of_a_call_names_the_remedy(self):
    form = {"class": "Blocking", "dims": [0], "lead": [], "new": 1}
    with self.assertRaisesRegex(jp.repro.ReproError, "Install the version"):
      repro_files.decode(form, replaying._CLASSES)


def members(path):
  with zipfile.ZipFile(path) as archive:
    return {name: archive.read(name) for name in archive.namelist()}


class SaveTest(ReproTestCase):
  def test_block_scales_beyond_e4m3_are_correct(self):
    """They are clamped, as `jp.quantize` says; infinite ones have no oracle."""
    x = normal(3, 64)
    x[0] *= 1e-8
    scales = (None, *map(np.float32, (1e-8, 1e8, np.inf)))

    def function(x, scales):
      return [jp.quantize(x, "nvfp4", global_scale=scale) for scale in scales]

    jp.repro.save(self.path, function, x, scales, data=True)
    found = jp.repro.replay(self.path)
    self.assertLen(found.calls, len(scales))
    self.assertIsNone(found.first_wrong, str(found))

  def test_names_and_data_are_saved_if_asked(self):
    w_q = WEIGHTS[0]

    def zanzibar(x):
      with jax.named_scope("zanzibar_scope"), jp.options(threads=1):
        codes = jp.quantize(x["zanzibar_x"], "mxfp8")
        return jp.linear(x["zanzibar_x"], w_q), codes

    jp.repro.save(self.path, zanzibar, {"zanzibar_x": X}, data=True, names=True)
    found = members(self.path)
    self.assertIn(b"['zanzibar_x']", found["manifest.json"])
    self.assertIn(b"repro_test.py", found["manifest.json"])
    self.assertIn(b"zanzibar_scope", found["manifest.json"])
    read = repro_files.read(pathlib.Path(self.path))
    np.testing.assert_array_equal(read.data[-1], X)
    replay = jp.repro.replay(self.path)
    self.assertIsNone(replay.first_wrong)
    self.assertIn("data: from the file", str(replay))

  @parameterized.parameters(
    (lambda x: x + 1, {}, ValueError, "must have a block-scaled call"),
    (lambda x: jax.debug.print("{}", jp.quantize(x, "mxfp8").scale[0]), {},
      NotImplementedError, "must not have effects, .*DebugEffect"),
    (lambda x: jp.quantize(x, "mxfp8"), {"data": True}, ValueError,
      "data=True needs arrays"),
    (jp.quantize, {"data": 1}, TypeError, "data must be True or False, got 1"),
    (3, {}, TypeError, "fn must be a function, got 3"),
  )  # fmt: skip
  def test_refusals(self, fn, options, error, message):
    x = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    with self.assertRaisesRegex(error, message):
      jp.repro.save(self.path, fn, x, **options)
    self.assertFalse(pathlib.Path(self.path).exists())

  def test_paths_are_checked(self):
    for name, call in (
      ("save", lambda: jp.repro.save(3, jp.quantize, X, "mxfp8")),
      ("replay", lambda: jp.repro.replay(3)),
    ):
      with self.assertRaisesRegex(TypeError, f"^{name}: path must be .* got 3"):
        call()

  def test_types_of_keys_and_donated_arrays_have_no_statistics(self):
    def function(key, x):
      return jp.linear(x + jax.random.normal(key, x.shape), WEIGHTS[0])

    x = jnp.asarray(X)
    x.delete()
    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    for args, are_known in (
      ((key, x), [True, True, False, False]),
      ((jax.random.key(0), X), [True] * 4),
    ):
      jp.repro.save(self.path, function, *args)
      inputs = repro_files.read(pathlib.Path(self.path)).inputs
      self.assertEqual([x.statistics is not None for x in inputs], are_known)
      self.assertIsNone(jp.repro.replay(self.path).first_wrong)

  def test_calls_in_functions_that_jax_calls_are_saved(self):
    def dot(x):
      return jp.linear(x, WEIGHTS[0])

    with_vjp = jax.custom_vjp(dot)
    with_vjp.defvjp(lambda x: (dot(x), None), lambda _, g: (g,))
    with_vmap = jax.custom_batching.custom_vmap(dot)
    with_vmap.def_vmap(lambda size, batched, x: (jax.vmap(dot)(x), True))

    def solve(x):
      solve = lambda matvec, b: dot(b) / 2
      return jax.lax.custom_linear_solve(dot, x, solve, symmetric=True)

    def composite(x):
      leaves, tree = jax.tree.flatten(WEIGHTS[0])
      dot = lambda x, *leaves: jp.linear(x, jax.tree.unflatten(tree, leaves))
      return jax.lax.composite(dot, "my.dot")(x, *leaves)

    linear_call = jax.custom_derivatives.linear_call
    functions = (
      *(solve, composite, jax.jit(dot), jax.checkpoint(dot)),
      *(with_vjp, with_vmap),
      lambda x: linear_call(lambda _, x: dot(x), lambda _, g: g, (), x),
      jax.grad(lambda x: jax.checkpoint(dot)(x).sum()),
      lambda x: jax.jvp(dot, [x], [x])[1],
    )
    jp.repro.save(self.path, lambda x: [f(x) for f in functions], X)
    found = jp.repro.replay(self.path)
    # Each has one call. That of the gradient dequantizes the weight.
    self.assertLen(found.calls, len(functions))
    self.assertIsNone(found.first_wrong, str(found))

  def test_loops_and_branches(self):
    w = WEIGHTS[0]

    def step(state):
      return state[0] + 1, jnp.tanh(jp.linear(state[1], w))

    def function(x, flag):
      x = jax.lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]
      return jax.lax.cond(
        flag, lambda x: x, lambda x: jp.linear(x, WEIGHTS[1]), x
      )

    static = jax.jit(function, static_argnums=1)
    jp.repro.save(self.path, static, X, 1)
    jp.repro.save(self.path, function, X, np.bool_(False))
    is_meant = lambda problem: problem.n == 64
    with planted("dot", lambda x, _: x.at[0, 0].add(1), is_meant):
      found = jp.repro.replay(self.path)
    self.assertEqual([x.is_wrong for x in found.calls], [True, True])

  def test_no_tracer_leaks(self):
    def function(x):
      step = lambda h, _: (jnp.tanh(jp.linear(h, WEIGHTS[0])), None)
      return jax.lax.scan(step, x, length=2)[0]

    with jax.checking_leaks():
      jp.repro.save(self.path, function, X)
    self.assertIsNone(jp.repro.replay(self.path).first_wrong)

  @parameterized.parameters(
    (lambda y: y, "differ .* by (0|.*e-0[5-9]) of"),
    (lambda y: y.at[1:].multiply(2), "differ .* by 1 of"),
    (lambda y: -y, "has NaN or Inf at other places"),
  )
  def test_infinity_hides_no_difference(self, change, message):
    x = X.copy()
    x[0, 0] = np.inf
    function = lambda x: jp.linear(x, WEIGHTS[0])
    with planted("dot", lambda y, _: change(y)):
      jp.repro.save(self.path, function, x, data=True)
    self.assertRegex(jp.repro.replay(self.path).program, message)

  def test_condition_of_a_loop_is_saved(self):
    def function(x):
      goes_on = lambda x: jp.linear(x, WEIGHTS[0])[0, 0] > 1e6
      return jax.lax.while_loop(goes_on, lambda x: x + 1, x)

    jp.repro.save(self.path, function, X)
    found = jp.repro.replay(self.path)
    self.assertLen(found.calls, 1)
    self.assertIsNone(found.first_wrong, str(found))

  def test_calls_that_are_not_found_are_refused(self):
    dot = lambda x: jp.linear(x, WEIGHTS[0])

    def function(x):
      return unknown_p.bind(x, jaxpr=jax.make_jaxpr(dot)(x))

    unknown_p = extend_core.Primitive("unknown")
    unknown_p.def_abstract_eval(lambda x, jaxpr: jaxpr.out_avals[0])
    evaluated = lambda x, jaxpr: extend_core.jaxpr_as_fun(jaxpr)(x)
    mlir.register_lowering(unknown_p, mlir.lower_fun(evaluated, True))
    with self.assertRaisesRegex(
      NotImplementedError, "save: fn must have no .* inside unknown"
    ):
      jp.repro.save(self.path, function, X)


class FusedTest(ReproTestCase):
  """Kernels that replace several operations are compared as calls."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.file = pathlib.Path(folder) / "fused.zip"
    stack = jp.quantize(normal(3, 64, 64), "uint4_32_min")
    sizes = np.array([4, 5, 0], np.int32)

    def layers(x):
      def step(h, i):
        with jax.named_scope("block"):
          h = jp.linear(h, WEIGHTS, layer=i)
        return jnp.tanh(jp.linear(h, stack, layer=i)), None

      h, _ = jax.lax.scan(step, x, np.arange(3))
      return jp.linear(h, stack[0]), jp.ragged_dot(h, stack, sizes)

    jp.repro.save(cls.file, layers, X, names=True)

  def test_kernels_come_before_the_operations_they_replace(self):
    found = jp.repro.replay(self.file)
    self.assertIsNone(found.first_wrong, str(found))
    calls = [call.description.split(" (")[0] for call in found.calls]
    layer, offset = "ragged_dot one layer of a stack", " with offset"
    for i, (start, end) in enumerate(
      [(layer, "64"), ("dot", "64"), (layer, offset), ("dot", "64")]
      + [("dot", offset), ("dot", "64"), ("ragged_dot", offset)]
    ):
      self.assertRegex(calls[i], f"^block_scaled_{start}\\b.*{end}$")
    self.assertRegex(found.calls[0].description, r"repro_test.py.* block\)$")
    # A loop does not repeat the stack.
    call = repro_files.read(self.file).calls[0]
    self.assertEqual(sorted(call.loops), [0, 0, 1, 1])

  def test_wrong_kernels_are_named(self):
    def change_if(is_wrong):
      def change(x, call):
        return x.at[0, 0].add(jnp.where(is_wrong(call), 1e3, 0))

      return change

    sizes = lambda call: call.group_sizes
    is_layer_1 = lambda call: (sizes(call)[1] == 9) | (sizes(call).max() < 9)
    with (
      planted(
        "ragged",
        change_if(lambda call: sizes(call)[2] == 9),
        lambda problem: problem.rhs.format == jp.MXFP8,
      ),
      planted("ragged", change_if(is_layer_1), with_offset=True),
      planted("dot", change_if(lambda _: True), with_offset=True),
    ):
      found = jp.repro.replay(self.file)
    for number, call in enumerate(found.calls):
      texts = [x.text for x in call.comparisons if x.is_wrong]
      expected = {
        0: [r"trip or shard [2], layer 2, at [0, 0]: got"],
        2: [r"trip or shard [1], layer 1, at [0, 0]: got"],
        4: ["at [0, 0]: got"],
        6: ["at [0, 0]: got"],
      }.get(number, [])
      self.assertLen(texts, len(expected), str(found))
      for text, start in zip(texts, expected, strict=True):
        self.assertStartsWith(text, start)


class ShardedTest(ReproTestCase):
  def operands(self, axis_type):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (axis_type,) * 2)
    put = lambda x, *spec: jax.device_put(
      np.asarray(x), NamedSharding(mesh, P(*spec))
    )
    return mesh, put(normal(8, 64), "data"), put(normal(32, 64), "model")

  def test_sharded_program_is_replayed_on_eight_devices_and_on_one(self):
    mesh, x, w = self.operands(AxisType.Auto)

    @jax.jit
    def function(x, w):
      y = jp.linear(x, jp.quantize(w, "mxfp8"))
      return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data")))

    jp.repro.save(self.path, function, x, w)
    self.assertEqual(replaying.num_devices(self.path), 8)
    manifest = members(self.path)["manifest.json"]
    self.assertIn("('data',) of {'data': 4, 'model': 2}", manifest.decode())
    found = jp.repro.replay(self.path)
    self.assertIsNone(found.first_wrong)
    self.assertIn("of their norm", found.program)
    with mock.patch.object(jax, "devices", lambda _: jax.local_devices()[:1]):
      found = jp.repro.replay(self.path)
    self.assertIsNone(found.first_wrong)
    self.assertIn("needs 8 cpu devices, got 1", found.program)

  def test_shards_of_a_shard_map_are_compared(self):
    mesh, x, w = self.operands(AxisType.Auto)

    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def function(x):
      return jp.linear(x, jp.quantize(np.asarray(w), "mxfp8"))

    jp.repro.save(self.path, function, np.asarray(x))
    self.assertIn("of their norm", jp.repro.replay(self.path).program)
    jp.repro.save(self.path, function, x)
    is_meant = lambda problem: problem.m == 2
    with planted("dot", lambda x, _: x.at[1, 1].set(99), is_meant):
      found = jp.repro.replay(self.path)
    self.assertEqual([x.is_wrong for x in found.calls], [False, True])
    with (
      mock.patch.object(jax, "devices", lambda _: jax.local_devices()[:1]),
      self.assertRaisesRegex(ValueError, "JAX_NUM_CPU_DEVICES=8"),
    ):
      jp.repro.replay(self.path)


class OracleTest(parameterized.TestCase):
  @parameterized.parameters(
    (1.0, 0.4, False), (1.0, 3.0, True), (np.nan, 0.0, True), (np.inf, 0, True)
  )
  def test_bound_decides(self, got, off, is_wrong):
    exact = np.ones((1, 2, 3))
    expected = oracle.Expected(
      exact=exact, bound=0 * exact + 1e-3, rows=np.arange(2)
    )
    result = np.full((2, 3), 1, np.float32)
    result[1, 2] = got + off * 1e-3
    ratio, text = expected.check(result)
    self.assertEqual(ratio > 1, is_wrong)
    self.assertStartsWith(text, "at [1, 2]")

  def test_nan_must_be_nan_and_overflow_is_free(self):
    exact = np.array([[[np.nan, 1e39]]])
    expected = oracle.Expected(exact=exact, bound=0 * exact, rows=np.arange(1))
    check = lambda *x: expected.check(np.array([x], np.float32))[0] > 1
    self.assertFalse(check(np.nan, np.inf))
    self.assertTrue(check(1.0, np.inf))

  @parameterized.parameters((0, 1, 1), (1, 3, 3), (1, 40, 16), (2, 40, 16))
  def test_trips_are_spread_from_first_to_last(self, loops, trips, count):
    shape = ((), (trips,), (4, trips // 4))[loops]
    x = np.arange(trips * 6).reshape(*shape, 6)
    fixed, outer = np.arange(2), np.arange(8).reshape(4, 2)
    operands, depths = [x, fixed], [loops, 0]
    if loops == 2:
      operands, depths = [*operands, outer], [*depths, 1]
    places, found = zip(*replaying._trips(operands, depths), strict=True)
    self.assertLen(found, count)
    self.assertEqual(places[-1], [n - 1 for n in shape])
    for one, first in ((found[0], True), (found[-1], False)):
      expected = [x[(0,) * loops] if first else x.reshape(-1, 6)[-1], fixed]
      if loops == 2:
        expected.append(outer[0 if first else -1])
      for got, value in zip(one, expected, strict=True):
        np.testing.assert_array_equal(got, value)

  def test_rows_of_a_large_dot_are_sampled(self):
    with mock.patch.object(oracle, "_MAX_WORK", 3 * 64 * 64):
      x, w = normal(40, 64), WEIGHTS[0]
      call = jax.make_jaxpr(jp.linear)(x, w).eqns
      (eqn,) = [e for e in call if "call" in e.params]
      arrays = [x, w.values, w.scale]
      expected = oracle.dot(eqn.params["call"].filled(map(jnp.asarray, arrays)))
    self.assertLen(expected.rows, 3)
    result = np.array(jp.linear(x, w))
    self.assertLessEqual(expected.check(result)[0], 1)
    result[39, 5] += 1
    self.assertStartsWith(expected.check(result)[1], "at [39, 5]")


class AutomaticTest(ReproTestCase):
  def setUp(self):
    super().setUp()
    self.folder = self.directory / "failures"
    self.enter_context(
      mock.patch.dict("os.environ", {failures.VARIABLE: str(self.folder)})
    )
    jax.clear_caches()
    self.addCleanup(jax.clear_caches)
    for module in (sys, threading):
      ignore = mock.patch.object(module, "excepthook", lambda *_: None)
      self.enter_context(ignore)
    failures._hook.cache_clear()
    failures._lowered.clear()

  def files(self):
    return sorted(self.folder.glob("*"))

  def test_debug_checks_write_the_call_once(self):
    x_q = jp.quantize(normal(5, 64), "mxfp8")
    poison = lambda x, _: x.at[1, 1].set(np.nan)
    with planted("dot", poison):
      for _ in range(2):
        with self.assertRaises(jp.NonFiniteError) as caught, jp.debug_checks():
          jax.jit(jp.block_scaled_dot)(x_q, x_q)
      (path,) = self.files()
      self.assertIn(str(path), str(caught.exception))
      replay = jp.repro.replay(path)
    self.assertEqual(replay.first_wrong, 0)
    self.assertIn("got nan", str(replay))
    self.assertIsNone(jp.repro.replay(path).first_wrong)
    everything = b"".join(members(path).values())
    self.assertNotIn(b".py", everything)
    self.assertEqual(repro_files.read(path).reason, "debug_checks")

  @parameterized.parameters("eager", "debug_checks", "uncaught", "thread")
  def test_error_of_a_kernel_writes_its_call(self, how):
    x_q = jp.quantize(normal(5, 64), "mxfp8")

    def call():
      return jp.block_scaled_dot(x_q, x_q, implementation="cpu")

    with mock.patch.object(cpu_library, "BEST_ISA", 77):
      with self.assertRaises(jax.errors.JaxRuntimeError) as caught:
        if how == "eager":
          call()
        with jp.debug_checks() if how == "debug_checks" else mock.MagicMock():
          jax.jit(call)().block_until_ready()
      if how == "uncaught":
        sys.excepthook(type(caught.exception), caught.exception, None)
      if how == "thread":
        args = type(caught.exception), caught.exception, None, None
        threading.excepthook(threading.ExceptHookArgs(args))
      notes = "\n".join(caught.exception.__notes__)
      self.assertIn(str(self.files()[0]), notes)
      (path,) = self.files()
      jax.clear_caches()
      (found,) = jp.repro.replay(path).calls
    texts = {x.implementation: x.text for x in found.comparisons}
    self.assertRegex(texts["cpu"], "isa must be")
    self.assertEqual(repro_files.read(path).reason, "handler")

  def test_error_of_a_kernel_with_an_offset_writes_its_call(self):
    w = jp.quantize(normal(64, 64), "uint4_32_min")
    with mock.patch.object(cpu_library, "BEST_ISA", 77):
      with self.assertRaises(jax.errors.JaxRuntimeError), jp.debug_checks():
        jax.jit(lambda x: jp.linear(x, w))(X)
      (path,) = self.files()
      jax.clear_caches()
      (found,) = jp.repro.replay(path).calls
    (one,) = found.comparisons
    self.assertRegex(one.text, "isa must be")
    jax.clear_caches()
    self.assertIsNone(jp.repro.replay(path).first_wrong)

  def test_other_errors_write_nothing(self):
    jp.quantize(normal(5, 64), "mxfp8")
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    self.assertEqual(failures.handler_failed(error), "")
    self.assertEmpty(self.files())

  def test_folder_has_limits(self):
    def write(i):
      x = jax.ShapeDtypeStruct((2, 32 * i + 32), np.dtype(np.float32))
      problem = problems.QuantizationProblem.along(
        1, shape=x.shape, dtype=x.dtype, format=jp.MXFP8
      )
      return failures.write("handler", [("block_quantize", problem, [x])])

    with mock.patch.object(failures, "MAX_FILES", 2):
      self.assertIn("To reproduce it", write(0))
      self.assertIn("Written before", write(0))
      self.assertIn("To reproduce it", write(1))
      self.assertIn("has 2 files", write(2))
    with mock.patch.object(failures, "MAX_BYTES", 100):
      self.assertRegex(write(2), r"of \d+ bytes. Remove some")
    self.assertLen(self.files(), 2)

  def test_nothing_is_written_without_the_variable(self):
    with mock.patch.dict("os.environ", {failures.VARIABLE: ""}):
      self.assertEqual(failures.write("handler", []), "")
      self.assertFalse(self.folder.exists())
