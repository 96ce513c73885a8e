"""docs/parity.md's table of public bugs cannot lie: it is compared with the tests themselves.

A test belongs to a code when its name begins with it (test_a1_..., test_F1_F2_...); where no name does, when its text
names it. After adding one, print the new rows with `python tests/cases/test_table.py` and put them into the document.
"""

import ast
import itertools
import re
from pathlib import Path

from longspan.parity.faults import FAULTS

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DOCUMENT = ROOT / "docs" / "parity.md"
NUMBERS = {
    "A": (1, 2, 4, 6, 8, 10, 13, 16),
    "B": (1, 3, 6, 8, 10),
    "C": (1, 4, 5, 7, 10, 12),
    "D": (1, 3, 5, 7, 8, 12),
    "E": (1, 2, 5, 8),
    "F": (1, 2, 5, 7, 9, 12, 13),
    "G": (1, 2, 5, 7, 10, 12, 14, 17, 18),
    "H": (1, 4, 5, 7, 8),
    "I": (1, 3, 5, 7, 10),
    "J": (1, 3, 4, 6),
    "K": (1, 4, 6, 7, 9, 10, 13),
    "L": (1, 4, 6, 7, 10, 11),
    "M": (1, 3, 4),
    "N": (1, 3, 4, 7),
    "O": (1, 2, 5, 8),
}
CODES = [f"{kind}{number}" for kind, numbers in NUMBERS.items() for number in numbers]


def codes_in_name(name: str) -> set[str]:
    """Codes that a test's name begins with."""
    return set(itertools.takewhile(lambda word: word in CODES, name.upper().split("_")[1:]))


def codes_in_text(text: str) -> set[str]:
    return set(re.findall(r"(?<![A-Za-z0-9_])[A-O]\d{1,2}(?![A-Za-z0-9_])", text)) & set(CODES)


def named_tests() -> dict[str, list[str]]:
    """Code -> "folder/file.py::test", in order: by their names, and where no name has the code, by their texts."""
    by_name: dict[str, list[str]] = {code: [] for code in CODES}
    by_text: dict[str, list[str]] = {code: [] for code in CODES}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):  # its control names codes and tests none
            continue
        source = path.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                place = f"{path.relative_to(TESTS)}::{node.name}"
                for code in codes_in_name(node.name):
                    by_name[code].append(place)
                for code in codes_in_text(ast.get_source_segment(source, node) or ""):
                    by_text[code].append(place)
    return {code: by_name[code] or by_text[code] for code in CODES}


def faults_of_codes() -> dict[str, list[str]]:
    """Code -> planted faults whose description begins with it."""
    return {code: [name for name, fault in FAULTS.items() if fault.what.split()[0] == code] for code in CODES}


def rows(titles: dict[str, str]) -> list[str]:
    tests, faults = named_tests(), faults_of_codes()
    return [
        f"| {code} | {titles[code]} | {', '.join(f'`{name}`' for name in tests[code]) or 'none'} | "
        f"{', '.join(faults[code]) or '-'} |"
        for code in CODES
    ]


def written() -> list[str]:
    return [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| [A-O]\d{1,2} \|", line)]


def titles_of(lines: list[str]) -> dict[str, str]:
    return {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in lines}


def test_there_are_83_codes_and_each_has_a_test() -> None:
    assert len(CODES) == len(set(CODES)) == 83
    without = [code for code, tests in named_tests().items() if not tests]
    assert not without, f"no test names {without}"


def test_the_table_says_what_the_tests_say() -> None:
    lines = written()
    expected = rows(titles_of(lines))
    wrong = [code for code, own, want in zip(CODES, lines, expected, strict=True) if own != want]
    assert not wrong, f"rows {wrong} differ: run `python tests/cases/test_table.py` and put its rows into {DOCUMENT}"


def test_a_code_is_found_where_it_stands() -> None:
    """Control: names, sentences and comments count; parts of other words do not."""
    assert codes_in_name("test_l6_l7_mask") == {"L6", "L7"} and codes_in_name("test_F1_F2_head") == {"F1", "F2"}
    assert codes_in_name("test_mask_l6") == set()
    assert codes_in_text('"""K7, K13: moments."""  # E2') == {"K7", "K13", "E2"}
    assert codes_in_text("H100 xA1 A1x H200 C_1 L_A1 Z1") == set()


if __name__ == "__main__":
    print("\n".join(rows(titles_of(written()))))
