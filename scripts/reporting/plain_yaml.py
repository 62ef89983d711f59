"""The config.yaml that a run keeps, as plain Python values; scripts/strict_yaml.py reads it."""
import strict_yaml


class PlainYamlError(ValueError):
    pass


def scalar(text):
    """What sluice writes: true, false, whole and other numbers, or text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def plain(node):
    if node.kind == "map":
        return {key: plain(value) for key, value in node.entries.items()}
    if node.kind == "list":
        return [plain(item) for item in node.items]
    if node.kind == "null":
        return None
    return node.text if node.quoted else scalar(node.text)


def read(text, name="config.yaml"):
    """An empty text is an empty map. PlainYamlError names line and column."""
    if not text.strip():
        return {}
    try:
        return plain(strict_yaml.Reader(name, text).document())
    except strict_yaml.Refused as error:
        raise PlainYamlError(str(error)) from None


def get(tree, path, default=None):
    """get(config, "model.moe.num_experts", 0)"""
    for part in path.split("."):
        if not isinstance(tree, dict) or tree.get(part) is None:
            return default
        tree = tree[part]
    return tree
