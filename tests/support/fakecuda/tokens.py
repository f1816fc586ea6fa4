"""The kernels and bytes of a generated token, counted on the fake device.

python -m tests.support.fakecuda.tokens llama3.2-1b gpt2-1.5b
"""

import sys
from collections import Counter

from tests.support.fakecuda import in_own_process
from tests.support.fakecuda.measure import generation

FEW, MANY = 4, 14  # new tokens of two runs, whose difference is of the later tokens
NAMES = {
    "bytes": "MB of elementwise kernels",
    "product_bytes": "MB of products",
    "attention_bytes": "MB of keys and values given to attention",
}


def of_a_token(preset: str, layers: int, **options) -> Counter:
    """Return the cost of one more token of a preset, from runs of one layer and of two.

    It has the kernels in the graph, of a layer and outside of the graph, and the bytes per kind,
    including those outside of the graph.
    """
    found = []
    for count in (1, 2):
        few, many = (
            in_own_process(generation, preset, rows=1, new=new, layers=count, **options)
            for new in (FEW, MANY)
        )
        outside = Counter({"outside": (many.launches - few.launches) // (MANY - FEW) - 1})
        for name, size in many.all_bytes().items():
            outside[name] = (size - few.all_bytes()[name]) // (MANY - FEW)
        found.append(Counter(graph=many.captured[0]) + many.captured_bytes[0] + outside)
    one, two = found
    each = {name: two[name] - one[name] for name in one}
    whole = Counter({name: one[name] + (layers - 1) * each[name] for name in one})
    return whole + Counter(of_a_layer=each["graph"])


def main() -> None:
    from megazoo.models.registry import find_config

    for preset in sys.argv[1:]:
        found = of_a_token(preset, find_config(preset).layers)
        print(f"{preset}: {found['graph']} kernels in the graph, {found['of_a_layer']} of a layer")
        print(f"{preset}: {found['outside']} launches outside of the graph")
        for name, text in NAMES.items():
            print(f"{preset}: {found[name] / 1e6:,.1f} {text}")


if __name__ == "__main__":
    main()
