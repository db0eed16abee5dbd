# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""`save` writes trees in memory as `load` reads them."""

import json
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.checkpoints import layouts
from jaxplugin.testing import checkpoint_files as files
from jaxplugin.testing import contract

ERROR = jp.checkpoints.CheckpointError
LAYOUTS = [x for x in layouts.LAYOUTS if x.formats]
CASES = [(x.name, str(format)) for x in LAYOUTS for format in x.formats]


def normal(*shape, dtype=files.BF16):
  x = np.random.default_rng(list(shape)).standard_normal(shape)
  return (x / 50).astype(dtype)


def reciprocal(scale):
  """Returns an f32 whose reciprocal's reciprocal is itself."""
  return np.float32(1) / (np.float32(1) / np.asarray(scale, np.float32))


def weight(format, *shape, **options):
  """Returns a weight that all layouts of a format can store."""
  x_q = jp.quantize(normal(*shape), format, **options)
  if x_q.global_scale is None:
    return x_q
  scale = jnp.asarray(reciprocal(x_q.global_scale))
  return jp.quantize(normal(*shape), format, global_scale=scale, **options)


class Case(files.CheckpointTestCase):
  def setUp(self):
    super().setUp()
    self.target = self.empty()

  def saved(self, tree, *, is_file=True, **options):
    path = self.target / ("x.safetensors" if is_file else "x")
    jp.checkpoints.save(path, tree, **options)
    return jp.checkpoints.load(path)


class RoundTripTest(Case):
  def test_names_are_keys_of_the_tree(self):
    w = weight("nvfp4", 96, 256)
    tree = {"mlp": {"up": {"weight": w}}, "ids": [np.arange(3), None]}
    tree["norm"] = jnp.ones(3, jnp.bfloat16)
    found = self.saved(tree, is_file=False)
    self.assertCountEqual(found, ["mlp.up.weight", "norm", "ids.0"])
    contract.assert_same_bits(found["mlp.up.weight"], w)
    self.assertEqual(found["norm"].dtype, files.BF16)
    np.testing.assert_array_equal(found["ids.0"], np.arange(3))

  @parameterized.parameters(*CASES)
  def test_files_are_those_of_quantize(self, layout, format):
    """Saving a loaded checkpoint writes the same files again.

    `quantizing_test` compares the numbers of these files with `jp.quantize`.
    """
    is_stack = layout == "gpt-oss"
    shape = (2, 64, 256) if is_stack else (64, 256)
    name = "a.experts" if is_stack else "a.weight"
    tensors = {name: normal(*shape), "norm.weight": normal(256)}
    source = self.folder(tensors, {"format": "pt"}, {"model_type": "x"})
    (source / "x.safetensors").rename(source / "model.safetensors")
    one, two = self.target / "one", self.target / "two"
    jp.checkpoints.quantize(source, one, format, layout=layout)
    tree = dict(jp.checkpoints.load(one))
    config = json.loads((one / "config.json").read_text())
    jp.checkpoints.save(two, tree, layout=layout, config=config)
    names = [x.name for x in one.iterdir()]
    self.assertCountEqual(names, [x.name for x in two.iterdir()])
    for name in names:
      a, b = ((x / name).read_bytes() for x in (one, two))
      if name.endswith(".json"):
        self.assertEqual(json.loads(a), json.loads(b))
      else:
        self.assertEqual(a, b)

  def test_experts(self):
    for layout, name, array, scale in (
      ("modelopt", "a", weight("nvfp4", 2, 64, 96, axis=1), (1, 1, 1)),
      ("gpt-oss", "a", weight("mxfp4", 2, 96, 64), None),
      ("torchao", "a.b", weight("nvfp4", 2, 96, 64, batch_dims=1), (2, 1, 1)),
      ("torchao", "a.b", weight("nvfp4", 2, 96, 64), (2, 1, 1)),
      ("torchao", "a.b", weight("mxfp8", 2, 96, 64), None),
    ):
      with self.subTest(layout):
        path = self.target / "x.safetensors"
        jp.checkpoints.save(path, {name: array}, layout=layout)
        found = jp.checkpoints.load(path)[name]
        if scale is None:
          self.assertIsNone(found.global_scale)
        else:
          self.assertEqual(found.global_scale.shape, scale)
        a, b = (np.asarray(jp.dequantize(x)) for x in (array, found))
        self.assertEqual(a.tobytes(), b.tobytes())
        path.unlink()

  def test_weights_without_rows(self):
    for layout, shape, axis, names in (
      ("modelopt", (0, 96), -1, ("nvfp4", "mxfp8", "mxfp4")),
      ("modelopt", (0, 64, 32), 1, ("nvfp4",)),
      ("compressed-tensors", (0, 96), -1, ("nvfp4", "mxfp8", "mxfp4")),
      ("comfyui", (0, 96), -1, ("nvfp4", "mxfp8")),
      ("torchao", (0, 96), -1, ("nvfp4", "mxfp8", "mxfp4")),
      ("torchao", (0, 16, 96), -1, ("nvfp4", "mxfp8", "mxfp4")),
      ("torchao", (2, 0, 96), -1, ("nvfp4", "mxfp8", "mxfp4")),
      ("gpt-oss", (2, 0, 96), -1, ("mxfp4",)),
    ):
      for name in names:
        with self.subTest(layout, shape=shape, format=name):
          w = jp.quantize(np.ones(shape, np.float32), name, axis=axis)
          found = self.saved({"a.weight": w}, layout=layout)["a.weight"]
          self.assertEqual(str(found.format), name)
          self.assertEqual((found.shape, found.axis), (shape, w.axis))
          self.assertEqual(jp.dequantize(found).shape, shape)
          (self.target / "x.safetensors").unlink()

  def test_arrays_that_kernels_read_become_linear(self):
    x = normal(64, 256)
    linear = jp.quantize(x, "nvfp4")
    for name, array in (
      ("unpacked", linear.unpack()),
      ("bytes", linear.to_bytes()),
      ("prepared", jp.prepare_weights(linear)),
      (
        "swizzled",
        jp.ScaledArray(
          linear.values,
          jp.swizzle_scale(linear.scale),
          linear.global_scale,
          "nvfp4",
          scale_layout="swizzled_128x4",
        ),
      ),
      ("surrogate", jp.quantize(x, "nvfp4", derivative="straight_through")),
    ):
      with self.subTest(name):
        path = self.target / f"{name}.safetensors"
        jp.checkpoints.save(path, {"a.weight": array})
        contract.assert_same_bits(jp.checkpoints.load(path)["a.weight"], linear)

  def test_kernels_are_weights_again(self):
    module = nn.Dense(64)
    x = jax.device_put(normal(2, 64))
    variables = jax.tree.map(
      lambda x: jax.device_put(normal(*x.shape, dtype=x.dtype)),
      jax.eval_shape(module.init, jax.random.key(0), x),
    )
    call = jax.jit(jp.accept_quantized(module.apply))
    heads = {"q.kernel": jax.device_put(normal(64, 4, 16))}
    tree, _ = jp.quantize_params(
      variables, "mxfp8", where=lambda p: 0 if "kernel" in p.path else False
    )
    expected = call(tree, x)
    tree |= jp.quantize_params(heads, "mxfp8", where=lambda p: 0)[0]
    for layout, is_file in (("modelopt", False), ("torchao", True)):
      with self.subTest(layout, is_file=is_file):
        found = self.saved(tree, layout=layout, is_file=is_file)
        kernel = found["params.kernel"]
        contract.assert_same_bits(found["q.kernel"], tree["q.kernel"])
        contract.assert_same_bits(found.read()["q.kernel"], tree["q.kernel"])
        self.assertEqual(found["q.kernel"].shape, (64, 4, 16))
        self.assertEqual(found["q.kernel"].dtype, jnp.bfloat16)
        restored = {
          "params": {"bias": tree["params"]["bias"], "kernel": kernel}
        }
        np.testing.assert_array_equal(call(restored, x), expected)

  def test_kernels_that_do_not_fit_are_errors(self):
    array = jp.quantize(normal(64, 256), "mxfp8")
    weight = jp.QuantizedWeight(array, (256, 64), (0,))
    for old, new, rule in (
      ("[256, 64]", "[256, 32]", "last dimensions of the array must be"),
      ("[0]", "[7]", "must have a shape, contracting dim"),
      ("[256, 64]", '[256, "x"]', "must have a shape, contracting dim"),
      ("float32", "float64", "must have a shape, contracting dim"),
      ("[[256", "[{}, [256", "must have a shape, contracting dim"),
    ):
      with self.subTest(new), self.assertRaisesRegex(ERROR, rule):
        path = self.target / "w.safetensors"
        path.unlink(missing_ok=True)
        jp.checkpoints.save(path, {"a.weight": weight})
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        text = data[8 : 8 + size].decode()
        escape = lambda x: x.replace('"', '\\"')
        self.assertIn(escape(old), text)
        text = text.replace(escape(old), escape(new)).encode()
        head = len(text).to_bytes(8, "little")
        path.write_bytes(head + text + data[8 + size :])
        jp.checkpoints.load(path)["a.weight"]

  def test_missing_global_scale_is_one(self):
    linear = jp.quantize(normal(64, 256), "nvfp4")
    array = jp.ScaledArray(
      linear.values, jnp.ones_like(linear.scale), None, "nvfp4"
    )
    found = self.saved({"a.weight": array})["a.weight"]
    self.assertEqual(np.asarray(found.global_scale).reshape(()), 1)
    np.testing.assert_array_equal(found.values, array.values)

  def test_sharded_arrays_are_fetched(self):
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x_q = jp.quantize(normal(64 * len(devices), 64), "mxfp8")
    placed = jax.device_put(x_q, rows)
    plain = jax.device_put(jnp.arange(len(devices)), rows)
    found = self.saved({"a.weight": placed, "b": plain})
    contract.assert_same_bits(found["a.weight"], x_q)
    np.testing.assert_array_equal(found["b"], np.arange(len(devices)))

  def test_tree_without_quantized_weights_has_no_quantization(self):
    old = {"model_type": "x", "quantization_config": {"quant_method": "fp8"}}
    self.saved({"a": np.ones(3)}, is_file=False, config=old)
    config = json.loads((self.target / "x/config.json").read_text())
    self.assertEqual(config, {"model_type": "x"})

  def test_files_name_the_layout_that_names_and_shapes_leave_open(self):
    tree = {"w": {"weight": weight("mxfp8", 256, 256)}}
    for layout in ("modelopt", "compressed-tensors"):
      path = self.empty() / "x.safetensors"
      with warnings.catch_warnings():
        warnings.simplefilter("error")
        jp.checkpoints.save(path, tree, layout=layout)
        found = jp.checkpoints.load(path)
      self.assertEqual(found.entries["w.weight"].layout, layout)
    other = weight("mxfp8", 256, 256)
    other = {"v.weight": other.values, "v.weight_scale": other.scale}
    self.file(other, path=path.with_name("y.safetensors"))
    with self.assertWarns(jp.checkpoints.LayoutWarning):
      jp.checkpoints.load(path.parent)

  def test_progress_counts_all_bytes(self):
    seen = []
    tree = {"a.weight": jp.quantize(normal(64, 64), "mxfp8"), "b": np.ones(2)}
    self.saved(tree, progress=lambda *x: seen.append(x))
    total = 64 * 64 + 64 * 2 + 16
    self.assertEqual(seen[-1], (total, total))


class ErrorTest(Case):
  def assert_refused(self, error, rule, tree, path="x.safetensors", **options):
    with self.assertRaisesRegex(error, rule):
      jp.checkpoints.save(self.target / path, tree, **options)
    self.assertEqual(list(self.target.glob("*")), [])

  def test_trees(self):
    w = jp.quantize(normal(32, 64), "mxfp8")
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    absmax = {"a.weight": np.ones(2, np.uint8), "a.weight_absmax": np.ones(2)}
    no_dtype = "'a' must have a dtype that safetensors stores, got"
    for rule, (error, tree) in {
      "tree must be a dict of arrays": (TypeError, w),
      "'a.b' must be an array, got 3": (TypeError, {"a": {"b": 3}}),
      "'a' must be an array, got 'x'": (TypeError, {"a": "x"}),
      r"got float32\(1.0\); convert a scalar by numpy.asarray": (
        *(TypeError, {"a": np.float32(1)}),
      ),
      "'a' must be an array, got ShapeDtypeStruct": (TypeError, {"a": struct}),
      f"{no_dtype} int4": (TypeError, {"a": jnp.ones(2, jnp.int4)}),
      f"{no_dtype} key": (TypeError, {"a": jax.random.key(0)}),
      "two leaves of the tree have the name 'a.b'": (
        *(ERROR, {"a": {"b": np.ones(1)}, "a.b": np.ones(1)}),
      ),
      "'__metadata__' is a reserved name": (ERROR, {"__metadata__": w}),
      # `load` would join these plain arrays.
      r"'a.weight' must be read back as a plain array of shape \[32, 64\],"
      r" but load would read mxfp8 of shape \[32, 64\]; rename": (
        *(ERROR, {"a.weight": w.values, "a.weight_scale": w.scale}),
      ),
      "it is quantized .it has 'a.weight_absmax'.": (ERROR, absmax),
    }.items():
      with self.subTest(rule):
        self.assert_refused(error, rule, tree)

  def test_traced_arrays(self):
    @jax.jit
    def f(x):
      jp.checkpoints.save(self.target / "x.safetensors", {"a": x})

    with self.assertRaisesRegex(TypeError, "'a' must be a concrete array"):
      f(jnp.ones(3))

  def test_layouts_and_formats(self):
    x = normal(32, 256)
    mxfp8 = jp.quantize(x, "mxfp8")
    for rule, (error, layout, array) in {
      "'a.weight': layout deepseek stores fp8_128x128, got mxfp8; for mxfp8"
      " choose layout modelopt, compressed-tensors, torchao, comfyui": (
        *(ValueError, "deepseek", mxfp8),
      ),
      "'a.weight': a matrix must be blocked along its last.*save array.T": (
        *(ERROR, "modelopt", mxfp8.T),
      ),
      "rank 2 or 3, got rank 1": (ERROR, "modelopt", mxfp8[0]),
      r"experts must be \[E, n, k\] blocked along k, got blocks along dim": (
        *(ERROR, "gpt-oss", jp.quantize(x[None], "mxfp4", axis=1)),
      ),
      "layout gpt-oss stores only quantized experts": (
        *(ERROR, "gpt-oss", jp.quantize(x, "mxfp4")),
      ),
      r"modelopt stores one global scale, got shape \[2, 1, 1\]": (
        *(ERROR, "modelopt"),
        jp.quantize(normal(2, 64, 32), "nvfp4", axis=1, batch_dims=1),
      ),
      "stack of layers or experts .*choose layout torchao": (
        *(ERROR, "compressed-tensors", jp.quantize(normal(2, 64, 32), "mxfp8")),
      ),
      "global scale, 0.5, is outside .*would consider it inverted": (
        *(ERROR, "modelopt", jp.quantize(x, "nvfp4", global_scale=0.5)),
      ),
    }.items():
      with self.subTest(rule):
        self.assert_refused(error, rule, {"a.weight": array}, layout=layout)

  def test_divisor_that_does_not_give_the_global_scale_back(self):
    grid = np.arange(1, 2, 2.0**-10, np.float32) / 4096
    scale = grid[reciprocal(grid) != grid][0]
    x_q = jp.quantize(normal(32, 64), "nvfp4", global_scale=scale)
    self.assert_refused(
      ERROR,
      "'a.weight': layout compressed-tensors stores 1 / global_scale in f32",
      {"a.weight": x_q},
      layout="compressed-tensors",
    )
    x_q = jp.quantize(normal(32, 64), "nvfp4", global_scale=reciprocal(scale))
    found = self.saved({"a.weight": x_q}, layout="compressed-tensors")
    contract.assert_same_bits(found["a.weight"], x_q)

  def test_formats_of_one_configuration(self):
    tree = {
      "a.weight": weight("nvfp4", 32, 64),
      "b.weight": weight("mxfp8", 32, 64),
    }
    rule = "got nvfp4 for 'a.weight' and mxfp8 for 'b.weight'"
    self.assert_refused(ERROR, rule, tree, "x")
    found = self.saved(tree)
    self.assertEqual(found["a.weight"].format, jp.NVFP4)
    self.assertEqual(found["b.weight"].format, jp.MXFP8)

  def test_paths(self):
    tree = {"a": np.ones(2)}
    with self.assertRaisesRegex(TypeError, "path must be a path, .* got 3"):
      jp.checkpoints.save(3, tree)
    self.assert_refused(
      ValueError, "config must be None for a file", tree, config={}
    )
    self.assert_refused(
      TypeError, "config must be a dict, got 3", tree, "x", config=3
    )
    self.assert_refused(ERROR, "must be an existing folder", tree, "no/x")
    for name in ("x.gguf", "x.bin"):
      rule = f"files are not written, got .*{name}; choose .*x.safetensors"
      self.assert_refused(ERROR, rule, tree, name)
    (self.target / "x.safetensors").touch()
    with self.assertRaisesRegex(ERROR, "x.safetensors already exists"):
      jp.checkpoints.save(self.target / "x.safetensors", tree)
