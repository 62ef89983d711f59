"""Numbers: how they are read, written, smoothed, counted and compared. Standard library alone."""
import bisect
import math
import statistics


def number(value):
    """A finite number, or None: writers put null where a value was not finite."""
    if isinstance(value, bool):
        return None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def short(value, digits=3):
    """1234567 -> 1.23M"""
    if value is None:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{unit}" if abs(value) < 1000 * size else f"{value / size:.0f}{unit}"
    return f"{value:.{digits}g}"


def fixed(digits, sign=""):
    return lambda value: "-" if value is None else f"{value:{sign}.{digits}f}"


def mean(values):
    """Of those that are there; None if none is."""
    values = [v for v in values if v is not None]
    return statistics.fmean(values) if values else None


def deviation(values):
    """Sample standard deviation; None for fewer than two."""
    values = [v for v in values if v is not None]
    return statistics.stdev(values) if len(values) > 1 else None


def smooth(values, share=0.02):
    """Median, then mean, over centred windows of that share of the run to either side: no lag, and no bump at a spike.
    Windows shrink towards the start, where curves are steep; at the end, what is there is averaged."""
    reach = max(1, int(share * len(values)))

    def over_windows(average, data):
        return [average(data[i - min(reach, i):i + min(reach, i) + 1]) for i in range(len(data))]

    return over_windows(statistics.fmean, over_windows(statistics.median, values))


def ema(values, keep=0.9):
    """e_0 = v_0, e_i = keep e_(i-1) + (1 - keep) v_i: the smoothing of the papers' curves."""
    out = []
    for value in values:
        out.append(value if not out else keep * out[-1] + (1 - keep) * value)
    return out


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def local_medians(values, reach=100):
    """Median of up to `reach` neighbours to either side, the value itself included."""
    window, out = sorted(values[:reach]), []
    for i in range(len(values)):
        if i + reach < len(values):
            bisect.insort(window, values[i + reach])
        if i > reach:
            del window[bisect.bisect_left(window, values[i - reach - 1])]
        half = len(window) // 2
        out.append(window[half] if len(window) % 2 else (window[half - 1] + window[half]) / 2)
    return out


def count_spikes(values, thresholds=(0.1, 0.2, 0.5), skip=0, reach=100):
    """How many values, after the first `skip`, lie above the local median by more than each threshold."""
    above = [v - m for v, m in zip(values, local_medians(values, reach))][skip:]
    return [sum(a > t for a in above) for t in thresholds]


def ranks(values):
    """1 for the least; equals share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    out, i = [0.0] * len(values), 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in range(i, j + 1):
            out[order[k]] = (i + j) / 2 + 1
        i = j + 1
    return out


def spearman(pairs):
    """(rho, n): Pearson's correlation of the ranks of both sides; rho is None below three pairs or without spread."""
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(pairs) < 3:
        return None, len(pairs)
    a, b = ranks([p[0] for p in pairs]), ranks([p[1] for p in pairs])
    ma, mb = statistics.fmean(a), statistics.fmean(b)
    va, vb = sum((x - ma) ** 2 for x in a), sum((y - mb) ** 2 for y in b)
    if va == 0 or vb == 0:
        return None, len(pairs)
    return sum((x - ma) * (y - mb) for x, y in zip(a, b)) / math.sqrt(va * vb), len(pairs)
