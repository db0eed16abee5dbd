# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each kind of fault of a wheel or an sdist is found.

`make release` builds a wheel and an sdist, and checks them.
"""

import pathlib
import re
import tarfile
import tempfile
import zipfile

import wheel_contents
from absl.testing import absltest, parameterized

# Name in a wheel -> name in the checkout.
MODULES = {
  "jaxplugin/__init__.py": "jaxplugin/__init__.py",
  "jaxplugin/dot/backends/cpu.py": "jaxplugin/dot/backends/cpu.py",
  "jaxplugin/kernels/__init__.py": "jaxplugin/kernels/__init__.py",
  "jaxplugin/kernels/gpu/configs.py": "kernels/gpu/configs.py",
}
LIBRARY = "jaxplugin/kernels/cpu/libjaxplugin_cpu.so"
WHEEL = {
  *MODULES,
  LIBRARY,
  "jaxplugin/py.typed",
  "jaxplugin-1.2.dist-info/METADATA",
  "jaxplugin-1.2.dist-info/licenses/LICENSE",
}
SDIST = {
  *wheel_contents.SDIST_ONLY,
  *MODULES.values(),
  "jaxplugin/py.typed",
}
FAILED = "jaxplugin/kernels/cpu/BUILD_FAILED.txt"


class WheelTest(parameterized.TestCase):
  def faults(self, *, without=(), and_=()):
    names = (WHEEL - set(without)) | set(and_)
    return wheel_contents.wheel_faults(names, MODULES)

  def test_complete_wheel_has_no_fault(self):
    self.assertEqual(self.faults(), [])

  @parameterized.parameters(*MODULES, "jaxplugin/py.typed")
  def test_missing_file_is_told(self, name):
    self.assertEqual(self.faults(without=[name]), [f"the wheel lacks {name}"])

  def test_missing_licence_is_told(self):
    self.assertEqual(
      self.faults(without=["jaxplugin-1.2.dist-info/licenses/LICENSE"]),
      ["the wheel lacks the licence"],
    )

  def test_missing_library_is_told(self):
    self.assertEqual(
      self.faults(without=[LIBRARY]),
      ["the wheel lacks the library of CPU kernels"],
    )
    self.assertEqual(
      self.faults(without=[LIBRARY], and_=[FAILED]),
      ["the wheel's CPU kernels did not compile"],
    )

  def test_wheel_for_any_platform_has_no_library(self):
    faults = [
      wheel_contents.wheel_faults(names, MODULES, has_library=False)
      for names in (WHEEL - {LIBRARY}, WHEEL)
    ]
    self.assertEqual(faults, [[], [f"the wheel has {LIBRARY}"]])

  @parameterized.parameters(
    "kernels/gpu/configs.py",
    "jaxplugin/dot/api_test.py",
    "jaxplugin/BUILD.bazel",
    "jaxplugin/testing/interpreted.py",
    "jaxplugin/testing/dot_suite/ragged_suite.py",
    "jaxplugin/kernels/cpu/ffi.cc",
    "hlo_tests/tool.py",
  )
  def test_what_does_not_belong_there_is_told(self, name):
    self.assertEqual(self.faults(and_=[name]), [f"the wheel has {name}"])


class SdistTest(parameterized.TestCase):
  def faults(self, names):
    names = {f"jaxplugin-1.2/{name}" for name in names}
    return wheel_contents.sdist_faults(names, MODULES.values())

  def test_complete_sdist_has_no_fault(self):
    self.assertEqual(self.faults(SDIST), [])

  @parameterized.parameters(
    "kernels/gpu/configs.py",
    "jaxplugin/kernels/__init__.py",
    "jaxplugin/dot/backends/cpu.py",
    "kernels/cpu/simd/codec.inl",
    "jaxplugin/dot/api_test.py",
  )
  def test_missing_file_is_told(self, name):
    self.assertEqual(self.faults(SDIST - {name}), [f"the sdist lacks {name}"])

  @parameterized.parameters(
    ".ci/run",
    ".venv-3.12/bin/python",
    "build/bazel/bazelrc",
    "jaxplugin/__pycache__/dot.pyc",
  )
  def test_what_does_not_belong_there_is_told(self, name):
    self.assertEqual(self.faults(SDIST | {name}), [f"the sdist has {name}"])


class VersionTest(absltest.TestCase):
  def faults(self, wheel="1.2", sdist="1.2", chapter="## [1.2] - 2026"):
    return wheel_contents.version_faults(
      f"jaxplugin-{wheel}-py3-none-linux_x86_64.whl",
      f"jaxplugin-{sdist}.tar.gz",
      f"# Changelog\n\n{chapter}\n",
      "1.2",
    )

  def test_one_version_everywhere_has_no_fault(self):
    self.assertEqual(self.faults(), [])

  def test_other_version_is_told(self):
    for what in ("wheel", "sdist"):
      self.assertEqual(
        self.faults(**{what: "1.1"}),
        [f"the {what} is of version 1.1, __init__.py says 1.2"],
      )

  def test_version_without_changes_is_told(self):
    for chapter in ("## [1.20]", "## [1x2]", "see ## [1.2]"):
      self.assertEqual(
        self.faults(chapter=chapter), ["CHANGELOG.md has no chapter of 1.2"]
      )


class DirectoryTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.write("CHANGELOG.md", "## [1.2]\n")
    self.write("jaxplugin/__init__.py", '__version__ = "1.2"\n')
    self.write("jaxplugin/dot/api_test.py")
    self.write("kernels/gpu/configs.py")
    self.write("kernels/cpu/tests/testing.py")
    self.write("jaxplugin/testing/interpreted.py")

  def write(self, name, text=""):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

  def pack(self, wheel, sdist):
    folder = self.root / "dist"
    folder.mkdir(exist_ok=True)
    for platform, machine in wheel_contents.MACHINES.items():
      path = folder / f"jaxplugin-1.2-py3-none-{platform}.whl"
      with zipfile.ZipFile(path, "w") as out:
        for name in wheel:
          if name != LIBRARY:
            out.writestr(name, "")
          elif machine is not None:
            # Not a library, except for the fields that are read.
            out.writestr(name, bytes(18) + machine.to_bytes(2, "little"))
    with tarfile.open(folder / "jaxplugin-1.2.tar.gz", "w:gz") as out:
      for name in sdist:
        out.addfile(tarfile.TarInfo(f"jaxplugin-1.2/{name}"))
    return folder

  def test_modules_are_those_of_the_checkout_without_tests(self):
    self.assertEqual(
      wheel_contents.modules(self.root),
      {
        "jaxplugin/__init__.py": "jaxplugin/__init__.py",
        "jaxplugin/kernels/gpu/configs.py": "kernels/gpu/configs.py",
      },
    )

  def test_suite_for_other_packages_is_among_them(self):
    self.write("jaxplugin/testing/contract.py")
    self.assertIn(
      "jaxplugin/testing/contract.py", wheel_contents.modules(self.root)
    )

  def test_suite_for_other_packages_is_whole(self):
    # The suite imports only modules that a wheel has.
    for name in wheel_contents.SUITE:
      source = (wheel_contents.ROOT / name).read_text()
      for folder, module in re.findall(
        r"^from jaxplugin\.(testing\S*) import (\w+)", source, re.M
      ):
        path = f"jaxplugin/{folder.replace('.', '/')}"
        self.assertTrue(
          {f"{path}/{module}.py", f"{path}.py"} & {*wheel_contents.SUITE},
          f"{name} imports {folder}.{module}",
        )

  def test_archives_are_read(self):
    wheel = WHEEL - {
      "jaxplugin/dot/backends/cpu.py",
      "jaxplugin/kernels/__init__.py",
    }
    sdist = SDIST - {"kernels/gpu/configs.py"}
    folder = self.pack(wheel, SDIST)
    self.assertEqual(wheel_contents.faults(folder, self.root), [])
    folder = self.pack(wheel | {"jaxplugin/dot/api_test.py"}, sdist)
    extra = "the wheel has jaxplugin/dot/api_test.py"
    self.assertEqual(
      wheel_contents.faults(folder, self.root),
      [
        *(f"{platform}: {extra}" for platform in wheel_contents.MACHINES),
        "the sdist lacks kernels/gpu/configs.py",
      ],
    )

  def wheels(self):
    """Returns the packed wheels for x86_64 and aarch64."""
    name = "jaxplugin-1.2-py3-none-manylinux_2_28_{}.whl"
    folder = self.pack(WHEEL, SDIST)
    return folder / name.format("x86_64"), folder / name.format("aarch64")

  def test_library_for_another_machine_is_told(self):
    x86, arm = self.wheels()
    arm.write_bytes(x86.read_bytes())
    self.assertIn(
      f"manylinux_2_28_aarch64: {LIBRARY} is for ELF machine 62, not 183",
      wheel_contents.faults(x86.parent, self.root),
    )

  @parameterized.parameters(
    (lambda x86, arm: x86.rename(str(x86).replace("2_28", "2_36")),
      "manylinux_2_36_x86_64"),
    (lambda x86, arm: x86.with_name("jaxplugin-1.1.tar.gz").write_text(""),
      "got 2 and 3: any, manylinux_2_28_aarch64, manylinux_2_28_x86_64"),
    (lambda x86, arm: arm.unlink(), "got 1 and 2: any, manylinux_2_28_x86_64"),
  )  # fmt: skip
  def test_directory_without_one_wheel_a_platform_is_refused(
    self, change, words
  ):
    x86, arm = self.wheels()
    change(x86, arm)
    (found,) = wheel_contents.faults(x86.parent, self.root)
    self.assertIn(words, found)
