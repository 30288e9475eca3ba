"""What a terminal shows of what was written to it."""

import re


def screen(written: str) -> list[str]:
    """What stands on the terminal at the end: it does what these few codes say."""
    lines, row, column = [""], 0, 0
    for code, text in re.findall(r"(\x1b\[[\d;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", written):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif code == "\r":
            column = 0
        elif code == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif code.endswith("A"):
            row -= int(code[2:-1])
        elif code == "\x1b[2K":
            lines[row] = ""
        else:
            assert code.endswith("m"), repr(code)  # colours; the cursor is never hidden
    return [line.rstrip() for line in lines]
