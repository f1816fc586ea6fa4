"""What tests of lm-evaluation-harness share: both sides of a directory, and what they answer. Ranks
import it: what takes long to load is loaded where it is used."""

import lm_eval
import lm_eval.evaluator
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import megazoo
from megazoo.evaluation import HarnessModel
from megazoo.tokenizer import open_tokenizer
from tests.support.training import context

LENGTH = 48  # tokens that each model takes
# Asking pip about the machine takes a second, each time.
lm_eval.evaluator.add_env_info = lambda results: None


WORDS = "def return import self text wrap line if not in for width the of ( ) : = , # 1".split()


def words(seed: int, count: int) -> str:
    draw = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=draw))


def ours(directory, ctx=None, **settings) -> HarnessModel:
    """megazoo's side of a directory."""
    model = megazoo.from_pretrained(directory, ctx).eval()
    return HarnessModel(model, open_tokenizer(directory), **settings)


def theirs(directory, **settings):
    """transformers' side of a directory."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(directory), device="cpu", dtype="float32", **settings)


def evaluated(model, files: list[str]) -> dict:
    """What the harness says of a model: of each task its results, and of each sample what was asked
    and answered. The last task goes through the chat template."""
    found = {}
    for chat, part in ((False, files[:-1]), (True, files[-1:])):
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=part,
            task_manager=TaskManager(include_defaults=False),
            apply_chat_template=chat,
            bootstrap_iters=0,
        )
        for name in results["results"] if results else ():
            samples = [(s["arguments"], s["resps"]) for s in results["samples"][name]]
            found[name] = (results["results"][name], samples)
    return found


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    """Requests of the harness, of one kind."""
    return [Instance(kind, {}, each, place) for place, each in enumerate(arguments)]


def direct_answers(model) -> list[list]:
    """A model's answers to requests of each kind, draws among them."""
    drawn = {"do_sample": True, "temperature": 3.0, "max_gen_toks": 9, "until": []}
    return [
        model.loglikelihood(asked("loglikelihood", ("def", " self"), ("", "text"))),
        model.loglikelihood_rolling(asked("loglikelihood_rolling", (words(1, 70),), ("a",))),
        model.generate_until(asked("generate_until", *(("def", drawn),) * 6)),
    ]


def answers_in(layout: dict, directory, files: list[str]) -> tuple[dict, list[list]]:
    """In any layout what the harness says of a model, and its answers."""
    model = ours(directory, context(**layout), batch_size=4)
    return evaluated(model, files), direct_answers(model)
