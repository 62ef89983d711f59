"""Reads the config.yaml that a run keeps: maps by indentation, lists of scalars or one-line maps, as sluice writes them.
Not a YAML parser: anchors, block scalars and several documents are not there, so they are not read."""


class PlainYamlError(ValueError):
    pass


def scalar(text):
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if text in ("null", "~", ""):
        return None
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def flow(text):
    """A value on one line: [a, b], {a: b, c: [d]}, or a scalar."""
    value, end = _flow(text, 0)
    if text[end:].strip():
        raise PlainYamlError(f"left over: {text[end:]!r}")
    return value


def _flow(text, i):
    while i < len(text) and text[i] == " ":
        i += 1
    if i < len(text) and text[i] in "[{":
        close, map_like = ("]", False) if text[i] == "[" else ("}", True)
        out, i = ({} if map_like else []), i + 1
        while True:
            while i < len(text) and text[i] in " ,":
                i += 1
            if i >= len(text):
                raise PlainYamlError(f"no {close} in {text!r}")
            if text[i] == close:
                return out, i + 1
            if map_like:
                colon = text.find(":", i)
                if colon < 0:
                    raise PlainYamlError(f"no : in {text!r}")
                key = text[i:colon].strip()
                out[key], i = _flow(text, colon + 1)
            else:
                value, i = _flow(text, i)
                out.append(value)
    if i < len(text) and text[i] in "\"'":
        end = text.find(text[i], i + 1)
        if end < 0:
            raise PlainYamlError(f"no closing quote in {text!r}")
        return text[i + 1:end], end + 1
    end = i
    while end < len(text) and text[end] not in ",]}":
        end += 1
    return scalar(text[i:end]), end


def read(text):
    lines = []
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            lines.append((len(line) - len(line.lstrip(" ")), line.strip()))
    value, end = _block(lines, 0, 0) if lines else ({}, 0)
    if end != len(lines):
        raise PlainYamlError(f"unexpected indentation: {lines[end][1]!r}")
    return value


def _block(lines, i, depth):
    if lines[i][1].startswith("- "):
        out = []
        while i < len(lines) and lines[i][0] == depth and lines[i][1].startswith("- "):
            out.append(flow(lines[i][1][2:]))
            i += 1
        return out, i
    out = {}
    while i < len(lines) and lines[i][0] == depth:
        key, colon, rest = lines[i][1].partition(":")
        if not colon:
            raise PlainYamlError(f"neither a key nor an entry: {lines[i][1]!r}")
        i += 1
        if rest.strip():
            out[key] = flow(rest.strip())
        elif i < len(lines) and lines[i][0] > depth:
            out[key], i = _block(lines, i, lines[i][0])
        else:
            out[key] = None
    return out, i


def get(tree, path, default=None):
    """get(config, "model.moe.num_experts", 0)"""
    for part in path.split("."):
        if not isinstance(tree, dict) or tree.get(part) is None:
            return default
        tree = tree[part]
    return tree
