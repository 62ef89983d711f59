"""The part of YAML that sweep files need, read strictly: maps, lists, scalars, in blocks or in brackets, and comments.

What means something else to other readers, or is none of this, is refused by file, line and column: anchors, aliases, tags,
block scalars, documents, tabs and other control characters, scalars over several lines, keys given twice. Scalars stay text:
the program reads them.
"""
import unicodedata

DEEPEST = 64  # levels of maps and lists inside each other; the deepest key of a configuration has 6


class Refused(Exception):
    """Something in a file, where, and why."""

    def __init__(self, path, line, column, message):
        super().__init__(f"{path}:{line}:{column}: {message}")


class Node:
    """kind: "map" (entries: {key: Node}), "list" (items: [Node]), "scalar" (text, quoted), "null"."""

    def __init__(self, kind, path, line, column, text="", quoted=False):
        self.kind, self.path, self.line, self.column = kind, path, line, column
        self.text, self.quoted, self.entries, self.items = text, quoted, {}, []

    def refuse(self, message):
        raise Refused(self.path, self.line, self.column, message)

    def flow(self):
        """On one line, as the program's command line takes it: plain scalars letter by letter."""
        if self.kind == "map":
            return "{" + ", ".join(f"{k}: {v.flow()}" for k, v in self.entries.items()) + "}"
        if self.kind == "list":
            return "[" + ", ".join(item.flow() for item in self.items) + "]"
        if self.kind == "null":
            return "null"
        return "'" + self.text.replace("'", "''") + "'" if self.quoted else self.text


class Reader:
    def __init__(self, path, text):
        self.path, self.lines = path, text.split("\n")
        for number, line in enumerate(self.lines):
            if not line.isprintable():
                self.check_letters(number, line)
        # Lines that say something: [number, indentation].
        self.rows = [[n, len(line) - len(line.lstrip())] for n, line in enumerate(self.lines)
                     if line.strip() and not line.lstrip().startswith("#")]
        self.row = self.depth = 0

    def refuse(self, line, column, message):
        raise Refused(self.path, line + 1, column + 1, message)

    def check_letters(self, number, line):
        for column, letter in enumerate(line):
            if letter == "\t":
                self.refuse(number, column, "a tab; indent with spaces")
            if unicodedata.category(letter) == "Cc":
                self.refuse(number, column, f"a control character (U+{ord(letter):04X})")

    def deeper(self, line, column):
        """Counts the level that begins here."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.refuse(line, column, f"maps and lists more than {DEEPEST} levels deep")

    def node(self, kind, line, column, **more):
        return Node(kind, self.path, line + 1, column + 1, **more)

    def document(self):
        if not self.rows:
            self.refuse(0, 0, "the file is empty")
        root = self.block(self.rows[0][1])
        if self.row < len(self.rows):
            self.refuse(*self.rows[self.row], "this line's indentation belongs to nothing above it")
        return root

    # ---- blocks: rows of one indentation

    def is_item(self, line, column):
        rest = self.lines[line][column:]
        return rest == "-" or rest.startswith("- ")

    def block(self, indent):
        line, column = self.rows[self.row]
        self.deeper(line, column)
        block = self.node("list" if self.is_item(line, column) else "map", line, column)
        while self.row < len(self.rows) and self.rows[self.row][1] == indent:
            line, column = self.rows[self.row]
            if self.is_item(line, column) != (block.kind == "list"):
                if block.kind == "list":
                    break  # the next key of a map whose list is not indented
                self.refuse(line, column, "a list's item among the keys of a map")
            if block.kind == "list":
                block.items.append(self.item(line, column))
            else:
                self.entry(block, line, column)
        if self.row < len(self.rows) and self.rows[self.row][1] > indent:
            self.refuse(*self.rows[self.row], "indented deeper than what it belongs to; a value stands on one line")
        self.depth -= 1
        return block

    def item(self, line, column):
        start = column + 1
        while start < len(self.lines[line]) and self.lines[line][start] == " ":
            start += 1
        if self.over(line, start):
            return self.below(line, column, column + 1)
        if self.lines[line][start] not in "[{'\"" and self.colon(line, start) is not None:
            self.rows[self.row][1] = start  # "- key: value": a map that begins here
            return self.block(start)
        return self.inline(line, start)

    def entry(self, block, line, column):
        colon = self.colon(line, column)
        if colon is None:
            self.refuse(line, column, "neither `key: value` nor a list's `- item`")
        key = self.key(line, column, colon)
        if key in block.entries:
            self.refuse(line, column, f"{key} is given twice (first in line {block.entries[key].line})")
        start = colon + 1
        while start < len(self.lines[line]) and self.lines[line][start] == " ":
            start += 1
        # A list may stand as far left as its key.
        block.entries[key] = self.below(line, column, column) if self.over(line, start) else self.inline(line, start)

    def below(self, line, column, least):
        """The block in the rows that follow, or null."""
        self.row += 1
        if self.row < len(self.rows):
            _, indent = self.rows[self.row]
            if indent > column or (indent == least == column and self.is_item(*self.rows[self.row])
                                   and not self.is_item(line, column)):
                return self.block(indent)
        return self.node("null", line, column)

    def inline(self, line, start):
        node, line, column = self.value(line, start, "")
        if not self.over(line, column):
            self.refuse(line, column, "more than one value in this place; put the text in quotes")
        while self.row < len(self.rows) and self.rows[self.row][0] <= line:
            self.row += 1
        return node

    def over(self, line, column):
        """Whether nothing, or a comment, is left of this line."""
        rest = self.lines[line][column:]
        return not rest.strip() or (rest.lstrip().startswith("#") and (rest[0] == " " or self.lines[line][column - 1] == " "))

    def colon(self, line, column):
        """Where the key that begins here ends, or None."""
        text = self.lines[line]
        if column < len(text) and text[column] in "'\"":
            _, _, end = self.quoted(line, column)
            return end if text[end:end + 1] == ":" and text[end + 1:end + 2] in ("", " ") else None
        for i in range(column, len(text)):
            if text[i] == "#" and i > 0 and text[i - 1] == " ":
                return None
            if text[i] == ":" and text[i + 1:i + 2] in ("", " "):
                return i
        return None

    def key(self, line, column, colon):
        text = self.lines[line][column:colon].strip()
        if text[:1] in ("'", '"'):
            return self.quoted(line, column)[0].text
        if not text or text[0] in "&*!|>@`%?[]{},#":
            self.refuse(line, column, f"no key of a sweep file: {text!r}")
        return text

    # ---- values: one line, or brackets over several

    def value(self, line, column, closers):
        """(node, line, column behind it). closers: what also ends a plain scalar, inside brackets."""
        first = self.lines[line][column]
        if first in "'\"":
            return self.quoted(line, column)
        if first in "[{":
            return self.brackets(line, column)
        if first in "&*!|>@`%?,]}":
            what = {"&": "anchors", "*": "aliases", "!": "tags", "|": "block scalars", ">": "block scalars"}
            self.refuse(line, column, f"{what.get(first, 'values that begin with ' + first)} are not read here; quote text")
        text, end = self.lines[line], column
        if self.is_item(line, column):
            self.refuse(line, column, "a list's item begins a line of its own")
        while end < len(text) and text[end] not in closers and not (text[end] == "#" and text[end - 1] == " "):
            if text[end] == ":" and (text[end + 1:end + 2] in ("", " ") or text[end + 1] in closers):
                if closers:
                    break
                self.refuse(line, end, "a second `: ` in one line; put the text in quotes")
            end += 1
        plain = text[column:end].rstrip()
        kind = "null" if plain in ("null", "~") else "scalar"
        return self.node(kind, line, column, text=plain), line, end

    def quoted(self, line, column):
        text, quote, out, i = self.lines[line], self.lines[line][column], "", column + 1
        while i < len(text):
            if text[i] == quote and quote == "'" and text[i + 1:i + 2] == "'":
                out, i = out + "'", i + 2
            elif text[i] == quote:
                return self.node("scalar", line, column, text=out, quoted=True), line, i + 1
            elif text[i] == "\\" and quote == '"':
                escaped = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}.get(text[i + 1:i + 2])
                if escaped is None:
                    self.refuse(line, i, 'an escape that is none of \\n \\t \\" \\\\; single quotes take all as it stands')
                out, i = out + escaped, i + 2
            else:
                out, i = out + text[i], i + 1
        self.refuse(line, column, "the quote is not closed in this line")

    def skip(self, line, column, opened):
        """To what comes next inside brackets, over ends of lines and comments."""
        while True:
            if column < len(self.lines[line]) and not self.over(line, column):
                if self.lines[line][column] != " ":
                    return line, column
                column += 1
                continue
            line, column = line + 1, 0
            if line >= len(self.lines):
                self.refuse(*opened, "this bracket is not closed")

    def brackets(self, line, column):
        opened = (line, column)
        self.deeper(line, column)
        is_map = self.lines[line][column] == "{"
        closer = "}" if is_map else "]"
        node = self.node("map" if is_map else "list", line, column)
        line, column = self.skip(line, column + 1, opened)
        while self.lines[line][column] != closer:
            part, next_line, next_column = self.value(line, column, ",[]{}")
            if is_map:
                key_line, key_column = line, column
                line, column = self.skip(next_line, next_column, opened)
                if part.kind not in ("scalar", "null") or self.lines[line][column] != ":":
                    self.refuse(key_line, key_column, "inside { } stands `key: value`")
                if part.text in node.entries:
                    self.refuse(key_line, key_column, f"{part.text} is given twice")
                line, column = self.skip(line, column + 1, opened)
                value, next_line, next_column = self.value(line, column, ",[]{}")
                node.entries[part.text] = value
            else:
                node.items.append(part)
            line, column = self.skip(next_line, next_column, opened)
            if self.lines[line][column] == ",":
                line, column = self.skip(line, column + 1, opened)
            elif self.lines[line][column] != closer:
                self.refuse(line, column, f"expected , or {closer}")
        self.depth -= 1
        return node, line, column + 1


def read(path):
    """The root of a file. Refused, or OSError."""
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read()
        except UnicodeDecodeError:
            raise Refused(path, 1, 1, "this is not UTF-8 text") from None
    return Reader(path, text.replace("\r\n", "\n")).document()
