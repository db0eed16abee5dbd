# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Named targets, detection, and the override, which is part of jit's key."""

import dataclasses
import os
import threading
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from jaxplugin.core import call_options, targets
from jaxplugin.kernels import toolkits

pytestmark = pytest.mark.smoke

# From NVIDIA's list of CUDA GPUs and AMD's list of LLVM targets.
COMPUTE_CAPABILITIES = {
  "a100": (8, 0),
  "l40s": (8, 9),
  "h100": (9, 0),
  "h200": (9, 0),
  "h20": (9, 0),
  "b200": (10, 0),
  "b300": (10, 3),
  "rtx5090": (12, 0),
  "gb10": (12, 1),
}
ARCHITECTURES = {"mi300x": "gfx942", "mi355x": "gfx950"}
# CUDA programming guide, "Technical specifications per compute capability":
# maximum shared memory per thread block, KiB.
SHARED_MEMORY_KIB = {
  (8, 0): 163,
  (8, 9): 99,
  (9, 0): 227,
  (10, 0): 227,
  (10, 3): 227,
  (12, 0): 99,
  (12, 1): 99,
}


class NamedTargetTest(parameterized.TestCase):
  @parameterized.parameters(*COMPUTE_CAPABILITIES.items())
  def test_nvidia_gpu_has_its_compute_capability(self, name, capability):
    found = targets.named_target(name)
    self.assertEqual(found.name, name)
    self.assertEqual(found.platform, "cuda")
    self.assertEqual(found.compute_capability, capability)
    self.assertIsNone(found.architecture)
    self.assertEqual(
      found.shared_memory_bytes, SHARED_MEMORY_KIB[capability] * 1024
    )

  @parameterized.parameters(*ARCHITECTURES.items())
  def test_amd_gpu_has_its_architecture(self, name, architecture):
    found = targets.named_target(name)
    self.assertEqual(found.platform, "rocm")
    self.assertEqual(found.architecture, architecture)
    self.assertIsNone(found.compute_capability)

  @parameterized.parameters(
    ("b200", "9.10", True),
    ("b200", "9.9.5", False),
    ("b200", None, False),
    ("rtx5090", "9.13", True),
    ("h200", "9.13", False),
    ("mi355x", None, False),
    ("cpu", None, False),
  )
  def test_block_scaled_cudnn_is_of_a_version_and_a_gpu(
    self, name, cudnn, expected
  ):
    target = targets.named_target(name, cudnn=cudnn)
    self.assertEqual(target.has_block_scaled_cudnn, expected)

  def test_every_gpu_has_sane_figures(self):
    for name in targets.TARGET_NAMES:
      found = targets.named_target(name)
      if found.platform == "cpu":
        continue
      self.assertBetween(found.core_count, 40, 400, name)
      self.assertBetween(found.shared_memory_bytes, 64 << 10, 256 << 10, name)
      self.assertBetween(found.l2_bytes, 16 << 20, 512 << 20, name)
      self.assertBetween(found.memory_bandwidth, 2e11, 1e13, name)

  @parameterized.parameters(
    ("B200", "b200"), ("GB200", "b200"), ("gb300", "b300")
  )
  def test_case_and_grace_cpu_do_not_change_the_gpu(self, name, gpu):
    self.assertEqual(targets.named_target(name), targets.named_target(gpu))
    with self.assertRaisesRegex(TypeError, f"named_target.'{name.lower()}'"):
      targets.use_target(name)

  @parameterized.parameters(
    (
      ValueError,
      "named_target: name must be .*a100.*mi355x.*gb300, got 'v100'; pass a GPU"
      " of the same architecture, or in Python a jp.Target",
      "v100",
    ),
    (TypeError, "got None; pass one of a100", None),
    (TypeError, "got 100; pass one of a100", 100),
    *(
      (
        ValueError,
        f"{name}.*no {program}.*'9.13'; leave it out",
        name,
        program.lower(),
      )
      for name in ("mi300x", "cpu")
      for program in ("cuDNN", "ptxas")
    ),
  )
  def test_refusal_of_a_name_or_version(self, error, message, name, *given):
    with self.assertRaisesRegex(error, message):
      targets.named_target(name, **dict.fromkeys(given, "9.13"))

  def test_contexts_refuse_wrong_arguments_when_they_are_called(self):
    with self.assertRaisesRegex(TypeError, r"pass jp.named_target\('b200'\)"):
      targets.use_target("b200")
    with self.assertRaisesRegex(ValueError, "options: threads must be 1 or mo"):
      call_options.options(threads=0)

  def test_no_ptxas_is_assumed_unless_named(self):
    for name in targets.TARGET_NAMES:
      self.assertIsNone(targets.named_target(name).ptxas_version)
      self.assertIsNone(targets.named_target(name).cudnn_version)
    found = targets.named_target("rtx5090", cudnn="9.13", ptxas="13.2")
    self.assertEqual(found.ptxas_version, (13, 2, 0))
    self.assertEqual(found.cudnn_version, (9, 13, 0))
    self.assertEqual(
      str(found), "rtx5090 (cuda, sm_120, cuDNN 9.13.0, ptxas 13.2.0)"
    )

  @parameterized.parameters("mi300x", "cpu")
  def test_ptxas_of_a_target_on_another_platform_is_refused(self, name):
    with self.assertRaisesRegex(ValueError, rf"\(13, 2, 0\) for {name}, of"):
      dataclasses.replace(targets.named_target(name), ptxas_version=(13, 2, 0))

  @parameterized.parameters(
    *(
      ("ptxas_version", version)
      for version in ("13.2", 13.2, (13, 2), (13, 2, "0"), (13, -2, 0), [1])
    ),
    ("name", ""),
    ("platform", None),
    ("compute_capability", 10.0),
    ("compute_capability", (10, 0, 0)),
    ("cudnn_version", "9.13"),
    ("core_count", True),
    ("l2_bytes", 0),
    ("shared_memory_bytes", 1.5),
    ("memory_bandwidth", float("nan")),
    ("cpu_kernels", ()),
    ("missing_libraries", ("jax-triton",)),
    ("options", {"threads": 2}),
  )
  def test_field_of_another_form_is_refused(self, field, value):
    b200 = targets.named_target("b200")
    with self.assertRaises(TypeError) as caught:
      dataclasses.replace(b200, **{field: value})
    self.assertIn(f"Target: {field} must be", str(caught.exception))
    self.assertIn(f"got {value!r};", str(caught.exception))

  def test_text_names_platform_capability_and_cudnn(self):
    text = str(targets.named_target("b300", cudnn=(9, 12, 1)))
    self.assertEqual(text, "b300 (cuda, sm_103, cuDNN 9.12.1)")
    self.assertEqual(
      str(targets.named_target("mi355x")), "mi355x (rocm, gfx950)"
    )


class VersionTest(parameterized.TestCase):
  @parameterized.parameters(
    ("9", (9, 0, 0)),
    ("9.13", (9, 13, 0)),
    ("9.13.2", (9, 13, 2)),
    ((9,), (9, 0, 0)),
    ((9, 13), (9, 13, 0)),
    ((9, 13, 2), (9, 13, 2)),
  )
  def test_parse_fills_missing_parts_with_zero(self, version, expected):
    self.assertEqual(targets.parse_version(version, "f: x"), expected)

  @parameterized.parameters(
    "", "9.", ".9", "9.13.0.1", "v9.13", "9.13rc1", "9,13", " 9.13", "9.13\n",
    "-9", ((),), ((9, -1),), ((9, 13, 0, 1),), 9, 9.13, None,
  )  # fmt: skip
  def test_malformed_version_is_refused_with_its_text(self, version):
    rule = "^f: x must be a version .*; write it as '9.13'"
    with self.assertRaisesRegex(ValueError, rule) as caught:
      targets.parse_version(version, "f: x")
    self.assertIn(repr(version), str(caught.exception))

  def test_format_is_the_inverse_of_parse(self):
    self.assertEqual(targets.format_version((9, 13, 2)), "9.13.2")
    self.assertEqual(targets.parse_version("9.13.2", "f: x"), (9, 13, 2))


class UseTargetTest(absltest.TestCase):
  def test_override_nests_and_is_restored(self):
    b200, h100 = targets.named_target("b200"), targets.named_target("h100")
    self.assertIsNone(targets.overriding_target())
    with targets.use_target(b200) as given:
      self.assertIs(given, b200)
      with targets.use_target(h100):
        self.assertEqual(targets.current_target(), h100)
      self.assertEqual(targets.current_target(), b200)
    self.assertIsNone(targets.overriding_target())
    self.assertEqual(targets.current_target(), targets.detect_target())

  def test_override_is_restored_after_an_exception(self):
    b200 = targets.named_target("b200")
    with self.assertRaisesRegex(RuntimeError, "in"), targets.use_target(b200):
      raise RuntimeError("in")
    self.assertIsNone(targets.overriding_target())

  def test_override_does_not_leak_into_other_threads(self):
    seen = []
    with targets.use_target(targets.named_target("b200")):
      thread = threading.Thread(
        target=lambda: seen.append(targets.overriding_target())
      )
      thread.start()
      thread.join()
    self.assertEqual(seen, [None])

  def test_override_is_part_of_the_cache_key_of_jit(self):
    traced = []

    @jax.jit
    def f(x):
      traced.append(targets.overriding_target())
      return x + 1

    b200, h100 = targets.named_target("b200"), targets.named_target("h100")
    x = jnp.ones(3)
    f(x)
    for override in (b200, h100, b200, h100):
      with targets.use_target(override):
        f(x)
        f(x)
    f(x)
    self.assertEqual(traced, [None, b200, h100])

  def test_equal_targets_share_a_trace(self):
    traced = []
    f = jax.jit(lambda x: traced.append(None) or x + 2)
    for _ in range(2):
      with targets.use_target(targets.named_target("b200", cudnn="9.13")):
        f(jnp.ones(3))
    self.assertLen(traced, 1)


class DetectTargetTest(parameterized.TestCase):
  def test_cpu_is_detected_with_the_cores_we_may_use(self):
    found = targets.detect_target("cpu")
    self.assertEqual(found.platform, "cpu")
    self.assertLen(os.sched_getaffinity(0), found.core_count)
    self.assertIsNone(found.compute_capability)
    self.assertIsNone(found.cudnn_version)

  def test_default_is_the_platform_of_the_default_device(self):
    platform = jax.local_devices()[0].platform
    expected = {"gpu": ("cuda", "rocm")}.get(platform, (platform,))
    self.assertIn(targets.detect_target().platform, expected)

  def test_platform_must_be_a_string(self):
    for platform in (3, ["cpu"]):
      with self.assertRaisesRegex(TypeError, "detect_target: platform must be"):
        targets.detect_target(platform)

  def test_platform_without_devices_is_all_that_is_known(self):
    found = targets.detect_target("no_such_platform")
    self.assertEqual(
      found,
      targets.Target(
        name="unknown no_such_platform device", platform="no_such_platform"
      ),
    )

  def test_unknown_limit_of_the_cpu_kernels_is_refused(self):
    for name in ("AVX2", "avx512"):
      limit = mock.patch.dict(os.environ, JAXPLUGIN_CPU_ISA=name)
      rule = f"JAXPLUGIN_CPU_ISA must be one of .*'avx2', .*got '{name}'. Unse"
      with limit, self.assertRaisesRegex(ValueError, rule):
        targets._local_cpu_kernels.__wrapped__()

  def test_gpu_has_the_ptxas_of_launches_and_in_an_export_none(self):
    device = types.SimpleNamespace(
      device_kind="a GPU", compute_capability="12.0", core_count=8
    )
    self.addCleanup(targets._detected.cache_clear)
    targets._detected.cache_clear()
    with (
      mock.patch.object(jax, "local_devices", lambda **_: [device]),
      mock.patch.object(targets, "_local_cudnn_version", lambda: None),
      mock.patch.object(toolkits, "ptxas_of_launches", lambda: (13, 4, 59)),
    ):
      found = targets.detect_target("cuda")
      self.assertEqual(found.ptxas_version, (13, 4, 59))
      exported = targets.detect_for_export("cuda")
      self.assertIsNone(targets.detect_target("rocm").ptxas_version)
      # Another process assembles kernels for a device of a topology.
      described = targets.target_of_device(device, "cuda")
    self.assertEqual(exported, dataclasses.replace(found, ptxas_version=None))
    self.assertEqual(described, exported)

  @parameterized.parameters(
    *targets.DEVICE_KINDS.items(), (None, "NVIDIA H100 PCIe")
  )
  def test_attached_gpu_has_the_bandwidth_of_its_data_sheet(self, name, kind):
    sheet = name and targets.named_target(name)
    device = types.SimpleNamespace(device_kind=kind, compute_capability="9.0")
    platform = sheet.platform if sheet else "cuda"
    with mock.patch.object(targets, "_local_cudnn_version", lambda: None):
      found = targets.target_of_device(device, platform)
    expected = sheet.memory_bandwidth if sheet else None
    self.assertEqual(found.memory_bandwidth, expected)

  def test_local_targets_end_with_the_cpu(self):
    self.assertEqual(targets.local_targets()[-1].platform, "cpu")
