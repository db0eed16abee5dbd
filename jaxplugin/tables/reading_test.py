# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables are read whole or refused with the line and the rule."""

import json
import os
import pathlib
import random
import socket

from absl.testing import parameterized

from jaxplugin.tables import reading, records
from jaxplugin.testing import folders
from jaxplugin.testing.measured import measured_tables, users

TABLE = measured_tables.table()
TEXT = TABLE.to_text()


def changed(line, *changes):
  """The text with a line's JSON changed, and written as a table's is."""

  def change(text):
    lines = text.split("\n")
    whole = lines[line - 1]
    prefix, suffix = ('{"header":', ",") if line == 1 else ("", "")
    if line > 1 and whole.endswith(","):
      suffix = ","
    value = json.loads(whole.removeprefix(prefix).removesuffix(suffix))
    for *path, last, new in changes:
      place = value
      for part in path:
        place = place[part]
      if new is DELETED:
        del place[last]
      else:
        place[last] = new
    compact = json.dumps(value, sort_keys=True, separators=(",", ":"))
    lines[line - 1] = f"{prefix}{compact}{suffix}"
    return "\n".join(lines)

  return change


DELETED = object()


def header(*changes):
  return changed(1, *changes)


def row(*changes):
  return changed(4, *changes)


def candidate(name, value):
  return row(("candidates", 0, name, value))


def replaced(old, new):
  def change(text):
    assert old in text, old
    return text.replace(old, new, 1)

  return change


def swapped(a, b):
  def change(text):
    lines = text.split("\n")
    lines[a - 1], lines[b - 1] = lines[b - 1], lines[a - 1]
    return "\n".join(lines)

  return change


def doubled(text):
  lines = text.split("\n")
  return "\n".join([*lines[:3], lines[2], *lines[3:]])


def same_bucket(text):
  """A row of m = 15 beside that of m = 16, which stands for it."""
  lines = text.split("\n")
  return "\n".join(
    [*lines[:3], lines[3].replace('"m":16', '"m":15'), *lines[3:]]
  )


# Name: (what is done to the text, what the error says).
BROKEN = {
  # The file's form.
  "no_json": (lambda text: "# tuned\n" + text, "truncated or not a table"),
  "byte_order_mark": (lambda text: "\ufeff" + text, "line 1: it must start"),
  "lines_of_windows": (lambda text: text.replace("\n", "\r\n"), "truncated"),
  "without_end": (replaced("]}\n", ""), "truncated"),
  "more_after_end": (lambda text: text + "\n", "truncated"),
  "two_tables": (lambda text: text + text, "line 5: it must end in ,"),
  "comma_missing": (replaced("},\n{", "}\n{"), "line 3: it must end in ,"),
  "comma_too_many": (replaced("}\n]}", "},\n]}"), "line 5: it must be JSON"),
  "row_cut_short": (lambda text: text.replace(text.split("\n")[3], '{"candid,'),
    "line 4: it must be JSON"),
  "names_unsorted": (
    replaced('{"k":4096,"lhs":"bfloat16"', '{"lhs":"bfloat16","k":4096'),
    "line 3: it must have sorted names"),
  "number_written_otherwise": (replaced("22.0}", "2.2e1}"), "line 4: .*sorted"),
  "name_twice": (replaced('"k":4096', '"k":1,"k":4096'), "'k' is used twice"),
  "comment": (replaced('"default":0', '"default":0/*fast*/'), "must be JSON"),
  "half_of_a_surrogate_pair": (replaced('"580.95"', '"\\ud800"'),
    "driver of about must be a string"),
  "control_character": (replaced("580.95", "\\u0007"), "driver of about"),
  "nested_deeply": (
    replaced('"default":0', '"default":' + "[" * 9999 + "]" * 9999),
    "line 3: it must be JSON: its brackets are nested too deeply"),
  # The header.
  "older_schema": (header(("schema", 0)), "got 0: an older release wrote it"),
  "newer_schema": (header(("schema", 2)), "got 2: a newer release wrote it"),
  "schema_is_true": (header(("schema", True)), "schema must be 1, got True"),
  "no_schema": (header(("schema", DELETED)), "schema must be 1, got None"),
  "header_is_a_list": (
    lambda text: text.replace(text.split("\n")[0], '{"header":[1],'),
    "schema must be 1, got None"),
  "header_has_more": (header(("more", 1)), "line 1: the header must be .*more"),
  "no_device": (header(("device", DELETED)), "the header must be an object"),
  "device_without_kind": (header(("device", "kind", DELETED)),
    "device must be an object of"),
  "device_of_no_cores": (header(("device", "core_count", 0)),
    "core_count of device must be a positive number, got 0"),
  "device_is_text": (header(("device", "h200")), "device must be .* got str"),
  "policy_of_another": (header(("policy", "fastest")), "policy must be"),
  "unknown_clock": (header(("measured", "clock", "sundial")),
    r"clock of measured must be one of .*got 'sundial'"),
  "no_rounds": (header(("measured", "rounds", -3)), "rounds of measured"),
  "no_day": (header(("date", "2026-02-30")), "date must be a day"),
  "date_written_otherwise": (header(("date", "20261123")), "date must be a"),
  "kernels_are_no_digest": (
    header(("implementations", "triton", "kernels", "abc")),
    "kernels must be a SHA-256"),
  "no_implementations": (header(("implementations", {})), "at least one"),
  "implementations_are_a_list": (header(("implementations", ["xla"])),
    "implementations must be an object"),
  "version_is_a_number": (
    header(("implementations", "xla", "toolchain", "jaxlib", 10)),
    "jaxlib of toolchain must be a string"),
  "operation_is_a_path": (header(("operation", "../../x")), "operation must"),
  "about_is_nested": (header(("about", "driver", {})), "driver of about"),
  "other_bucketed_size": (header(("bucketed", "rows")),
    "bucketed must be 'm', got 'rows'"),
  # Rows.
  "rows_unsorted": (swapped(3, 4), "rows must be sorted"),
  "row_twice": (doubled, "must not repeat a problem"),
  "row_twice_in_its_bucket": (same_bucket, "must not repeat a problem"),
  "row_is_null": (lambda text: text.replace(text.split("\n")[3], "null,"),
    "line 4: a row must be an object"),
  "row_without_default": (row(("default", DELETED)), "line 4: a row must be"),
  "row_has_more": (row(("fast", True)), "line 4: a row must be an object"),
  "default_is_no_candidate": (row(("default", 2)), "one of 2 cand.*got 2"),
  "default_is_true": (row(("default", True)), "got True"),
  "no_candidates": (row(("candidates", [])), "must have 1 to 16 candidates"),
  "candidates_are_an_object": (row(("candidates", {})), "must be a list"),
  "candidates_unsorted": (
    lambda text: text.replace("22.0", "92.0").replace("23.1", "93.1"),
    "line 4: candidates must be sorted by their medians"),
  "candidate_twice": (
    row(
      ("candidates", 1, "implementation", "triton"),
      ("candidates", 1, "config", {"block_m": 16, "path": "small_m"}),
    ),
    "must not repeat a candidate",
  ),
  "seventeen_candidates": (
    row(("candidates", [{
      "config": {"x": i},
      "implementation": "xla",
      "interval_us": [1.0, 1.0],
      "median_us": 1.0,
    } for i in range(17)])),
    "must have 1 to 16 candidates, got 17",
  ),
  "implementation_not_in_the_header": (candidate("implementation", "cudnn"),
    r"only the implementations of the header, .*got \['cudnn'\]"),
  "implementation_is_a_number": (candidate("implementation", 1), "a string"),
  "time_is_nan": (replaced("22.0", "NaN"), "line 4: .*NaN is not allowed"),
  "time_is_infinite": (replaced("22.0", "Infinity"), "Infinity is not allowed"),
  "time_overflows": (replaced("22.0", "1e999"), "a number must fit"),
  "time_is_zero": (candidate("median_us", 0.0), "must be above 0"),
  "time_is_a_week": (candidate("median_us", 6e11), "must be above 0 and at"),
  "time_is_whole": (candidate("median_us", 22), "a finite number with a point"),
  "interval_of_one": (candidate("interval_us", [22.0]), "must be two times"),
  "interval_beside_median": (candidate("interval_us", [23.0, 24.0]),
    "the median must lie inside its interval"),
  "interval_is_nested": (candidate("interval_us", [[1.0], 2.0]), "the first"),
  "config_is_null": (candidate("config", None), "config must be an object"),
  "config_has_a_fraction": (candidate("config", {"a": 0.5}), "a of config"),
  "config_is_huge": (candidate("config", {"block_m": 2**60}),
    r"block_m of config must be within 2\^53"),
  "number_of_5000_digits": (replaced('"n":4096', '"n":' + "9" * 5000), "JSON"),
  "field_has_no_name": (candidate("config", {"": 1}), "a field of config"),
  "too_many_fields": (candidate("config", {f"f{i}": i for i in range(65)}),
    "config must have at most 64 fields, got 65"),
  "problem_is_empty": (row(("problem", {})), "problem must have a field"),
  "problem_without_m": (row(("problem", "m", DELETED)), "m of problem must be"),
  "m_is_true": (row(("problem", "m", True)), "m of problem must be a positive"),
}  # fmt: skip


class ParseTest(parameterized.TestCase):
  def test_a_table_is_read_as_it_was_written(self):
    self.assertEqual(reading.parse(TEXT), TABLE)
    empty = measured_tables.records.table_of(TABLE.header, ())
    self.assertEqual(reading.parse(empty.to_text()), empty)

  @parameterized.named_parameters(
    (name, *case) for name, case in BROKEN.items()
  )
  def test_broken_table_is_refused_with_its_line_and_rule(
    self, break_, message
  ):
    text = break_(TEXT)
    self.assertNotEqual(text, TEXT)
    with self.assertRaisesRegex(records.TableError, message):
      reading.parse(text)

  def test_a_table_cut_anywhere_is_refused(self):
    for end in range(len(TEXT)):
      with self.assertRaises(records.TableError):
        reading.parse(TEXT[:end])

  def test_what_is_read_of_a_damaged_table_is_what_the_file_says(self):
    """Nothing but a TableError, and never a table of another text."""
    generator = random.Random(0)
    is_read = 0
    for _ in range(2000):
      damaged = list(TEXT)
      for _ in range(generator.randint(1, 3)):
        place = generator.randrange(len(damaged))
        damaged[place] = generator.choice('0123456789.,:{}[]"-eE\n\u00e9atn')
      text = "".join(damaged)
      try:
        table = reading.parse(text)
      except records.TableError:
        continue
      is_read += 1
      self.assertEqual(table.to_text(), text)
    self.assertGreater(is_read, 0)  # another digit is another table


def circle(path):
  path.symlink_to(path.with_name("other.json"))
  path.with_name("other.json").symlink_to(path)


def listen(path):
  with socket.socket(socket.AF_UNIX) as server:
    server.bind(str(path))


def fill_gigabytes(path):
  with path.open("w") as file:
    file.write(TEXT)
    file.truncate(1 << 40)  # a hole


# Name: (what is done with the path, what the error says).
UNREADABLE = {
  "no_file": (lambda path: None, "cannot be read: No such file"),
  "directory": (pathlib.Path.mkdir, "cannot be read: Is a directory"),
  "circle_of_links": (circle, "cannot be read: Too many levels of symbolic"),
  "pipe": (os.mkfifo, "must be a regular file"),
  "socket": (listen, "cannot be read"),
  "device_without_end": (lambda path: path.symlink_to("/dev/zero"),
    "must be a regular file"),
  "bytes_that_are_no_text": (
    lambda path: path.write_bytes(TEXT.encode().replace(b"580", b"\xff80")),
    "must be UTF-8: byte [0-9]+ is not"),
  "zeros": (lambda path: path.write_bytes(bytes(1000)), "truncated"),
  "gigabytes": (fill_gigabytes,
    f"at most {reading.MAX_BYTES} bytes, got {1 << 40}"),
  "wrong_line": (lambda path: path.write_text(row(("default", 9))(TEXT)),
    "line 4: default must be the number of"),
}  # fmt: skip


class FileTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = folders.new(self) / "table.json"

  def test_a_file_is_read_through_a_link(self):
    self.path.write_text(TEXT)
    link = self.path.with_name("link.json")
    link.symlink_to(self.path)
    self.assertEqual(reading.read(link), TABLE)

  @parameterized.named_parameters(
    (name, *case) for name, case in UNREADABLE.items()
  )
  def test_error_names_the_file_and_the_reason(self, make, message):
    make(self.path)
    with self.assertRaisesRegex(
      records.TableError, f"^table {self.path}: .*{message}"
    ):
      reading.read(self.path)

  def test_file_of_somebody_else(self):
    self.path.write_text(TEXT)
    self.path.chmod(0)
    self.path.parent.chmod(0o755)
    users.become_nobody(self)
    with self.assertRaisesRegex(records.TableError, "Permission denied"):
      reading.read(self.path)
