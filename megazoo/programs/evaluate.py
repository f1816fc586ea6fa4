"""Score texts or choices, classify texts, or run tasks of lm-evaluation-harness, with a megazoo
checkpoint or a Hugging Face model, in any parallel layout.

$ megazoo evaluate runs/a --text book.txt
$ torchrun --nproc-per-node 4 -m megazoo evaluate path/to/llama --tp 2 --pp 2 \\
      --text pile.jsonl --stride 512
$ megazoo evaluate path/to/llama --text pile.jsonl --logprobs tokens.jsonl --top-k 5
$ megazoo evaluate path/to/llama --choices questions.jsonl --output scores.jsonl
$ megazoo evaluate runs/classifier --labels reviews.jsonl --output predictions.jsonl
$ torchrun --nproc-per-node 2 -m megazoo evaluate path/to/llama --tp 2 --tasks arc_easy,my_task.yaml

--text prints the loss in nats per token, the perplexity, and bits per byte. --logprobs also writes
the log-probability of each token, given the tokens before it in its window. --choices reads lines
of {"context": "...", "choices": ["...", ...]} and prints the log-likelihood of each choice after
its context, in nats. If lines have "answer" (the index of the correct choice), it also prints how
often the most likely choice is correct. --labels reads lines of {"text": "..."}, optionally with
"text_pair", and predicts the label of each with a classifier. If lines have "label", it also
prints the loss, the accuracy and, for two labels, the F1 score of label 1. --tasks prints the
table of the harness, which `pip install -e '.[eval]'` in the clone of megazoo installs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from megazoo.cli.flags import parse_flags
from megazoo.cli.inference import InferenceOptions, run_with_model
from megazoo.data.labels import REGRESSION, Labels, encode_texts, kept_tokens, labels_of
from megazoo.environment import is_rank_zero
from megazoo.errors import UserError
from megazoo.evaluation.classifying import Tally, classify, predictions, tally
from megazoo.evaluation.scoring import evaluate_texts, score_choices
from megazoo.files import regular_file, without_mark, write_text
from megazoo.layers.classification import loss_sum
from megazoo.settings import File, Name, flag_of, unset
from megazoo.terminal import byte_bar, count_bar, print_rank_0
from megazoo.tokenizer.base import first_token
from megazoo.trainer.classifier import measures_of


@dataclass
class Options(InferenceOptions):
    """Texts, choices, labels or tasks to score."""

    text: File = None
    """File to score: one text, or documents if its name ends in .jsonl."""
    json_key: str = "text"
    """Key of the text in each line of the JSONL file."""
    choices: File = None
    """JSONL file of contexts with choices."""
    labels: File = None
    """JSONL file of texts for a classifier, with or without labels."""
    tasks: Name = None
    """Tasks of lm-evaluation-harness, separated by commas: names (the harness downloads their
    data), YAML files, or directories of YAML files."""
    num_fewshot: Annotated[int | None, unset("INT", "the task's")] = None
    """Number of solved examples before each question of a task."""
    limit: Annotated[float | None, unset("NUMBER", "all")] = None
    """Number of documents per task. Below 1: fraction of the documents."""
    apply_chat_template: bool = False
    """Format the questions of tasks as conversations, with the chat template of the tokenizer."""
    seq_length: Annotated[
        int | None,
        unset("INT", "max-positions of the model; at most 2048, except for tasks"),
    ] = None
    """Context length in tokens. For a classifier: maximum number of tokens per row."""
    stride: int = 0
    """Tokens between the starts of consecutive windows of a long text. 0: --seq-length, so that
    windows do not overlap."""
    logprobs: File = None
    """JSONL output file with one line per document of --text: "tokens" (ids) and "logprobs" (nats).
    """
    top_k: int = 0
    """Number of most likely tokens to write per token of --logprobs: "top_ids", "top_logprobs"."""
    batch_size: int = 8
    """Number of windows, choices, rows or requests of tasks per batch."""
    output: File = None
    """Output file. JSON for texts and tasks; JSONL with one line per item for choices and labels.
    """


def main(arguments: list[str]) -> None:
    options = parse_flags(Options, arguments, __doc__)
    kinds = (options.text, options.choices, options.labels, options.tasks)
    if sum(kind is not None for kind in kinds) != 1:
        raise UserError("use exactly one of --text, --choices, --labels and --tasks")
    check_task_flags(options)
    if options.batch_size < 1:
        raise UserError(f"--batch-size {options.batch_size} must be at least 1")
    if options.logprobs and not options.text:
        raise UserError("--logprobs needs --text")
    if options.top_k and not options.logprobs:
        raise UserError("--top-k needs --logprobs")
    if options.top_k < 0:
        raise UserError(f"--top-k {options.top_k} must be 0 or more")
    check_output_files(options)
    alone = options.one_rank
    requests = read_choices(options.choices, alone) if options.choices else None
    documents = read_texts(options.text, options.json_key, alone) if options.text else None
    rows = list(_json_lines(options.labels, alone)) if options.labels else None
    tasks = None
    if options.tasks is not None:
        from megazoo.evaluation.tasks import find_tasks  # slow, and needs an optional package

        tasks = find_tasks(options.tasks)
    run_with_model(options, partial(score, options, requests, documents, rows, tasks))


def score(options: Options, requests, documents, rows, tasks, model, tokenizer) -> None:
    """Score the one input that is not None, and write its lines to --output."""
    if tasks is not None:
        lines = [answered_tasks(model, tokenizer, tasks, options)]
    elif rows is not None:
        lines = classified(model, tokenizer, rows, options)
    elif documents is not None:
        lines = [scored_texts(model, tokenizer, documents, options)]
    else:
        lines = scored_choices(model, tokenizer, requests or [], options.batch_size)
    if options.output and is_rank_zero():
        write_text("--output", options.output, "".join(json.dumps(line) + "\n" for line in lines))
    if dist.is_initialized():
        dist.destroy_process_group()


def check_output_files(options: Options) -> None:
    """Raise UserError for an output file that can't be written, or is an input file."""
    inputs = (options.text, options.choices, options.labels)
    taken = {file.resolve(): "the input file" for file in inputs if file}
    for flag, file in (("--output", options.output), ("--logprobs", options.logprobs)):
        if file is None:
            continue
        if not file.absolute().parent.is_dir():
            raise UserError(f"{flag}: {file.parent} is not a directory")
        if file.is_dir():
            raise UserError(f"{flag}: {file} is a directory: use the name of a file")
        if used := taken.get(file.resolve()):
            raise UserError(f"{flag}: {file} is {used}: use another name")
        taken[file.resolve()] = f"the file of {flag}"


def scored_texts(model, tokenizer, documents: list[bytes], options: Options) -> dict:
    """Score documents, print the scores, write --logprobs, and return the scores as a line of the
    output."""
    length, lines = length_of(model, options), []

    def add_line(ids: list[int], scores: torch.Tensor) -> None:
        logprobs, top, top_ids = scores.split([1, options.top_k, options.top_k], dim=1)
        line = {"tokens": ids, "logprobs": logprobs[:, 0].tolist()}
        if options.top_k:
            line |= {"top_ids": top_ids.long().tolist(), "top_logprobs": top.tolist()}
        lines.append(json.dumps(line) + "\n")

    with byte_bar(sum(map(len, documents)), "score") as bar:
        result = evaluate_texts(
            model,
            tokenizer,
            documents,
            length=length,
            stride=options.stride,
            batch=options.batch_size,
            progress=bar.update,
            top_k=options.top_k,
            each=add_line if options.logprobs else None,
        )
    if options.logprobs and is_rank_zero():
        write_text("--logprobs", options.logprobs, "".join(lines))
    print_rank_0(
        f"documents       {result.documents:,}, {result.bytes:,} bytes, {result.tokens:,} tokens"
    )
    first, apart = first_token(tokenizer), options.stride or length
    name = tokenizer.decode([first])
    print_rank_0(
        f"read in         windows of {length:,} tokens, {apart:,} apart; each text follows the "
        f"token {first}{f', {name}' if name else ''}"
    )
    print_rank_0(f"loss            {result.loss:.6f} nats per token")
    print_rank_0(f"perplexity      {result.perplexity:.4f}")
    print_rank_0(f"bits per byte   {result.bits_per_byte:.6f}")
    return {
        **vars(result),
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
    }


def check_task_flags(options: Options) -> None:
    """Raise UserError for flags that need --tasks, and for values out of range."""
    for name in ("num_fewshot", "limit", "apply_chat_template"):
        value = getattr(options, name)
        if options.tasks is None and value is not None and value is not False:
            raise UserError(f"{flag_of(name)} needs --tasks")
    limit = options.limit
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit.is_integer())):
        raise UserError(
            f"--limit {limit:g} must be a number of documents, or a fraction above 0 and below 1"
        )
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise UserError(f"--num-fewshot {options.num_fewshot} must be 0 or more")


def answered_tasks(model, tokenizer, tasks, options: Options) -> dict | None:
    """Run tasks, print the table of the harness, and return the results as a line of the output.

    tasks: result of `find_tasks`. Returns None except on the first rank of each machine.
    """
    from lm_eval.utils import handle_non_serializable, make_table

    from megazoo.evaluation.tasks import run_tasks

    results = run_tasks(
        model,
        tokenizer,
        tasks,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        batch_size=options.batch_size,
        max_length=None if options.seq_length is None else length_of(model, options),
    )
    if results is None:
        return None
    print_rank_0(make_table(results))
    if "groups" in results:
        print_rank_0(make_table(results, "groups"))
    return json.loads(json.dumps(results, default=handle_non_serializable))


def length_of(model, options: Options) -> int:
    """Return the context length in tokens."""
    longest = model.longest_sequence(model.config)
    length = min(longest, 2048) if options.seq_length is None else options.seq_length
    if not 1 <= length <= longest:
        raise UserError(f"--seq-length {length} must be from 1 to {longest}, the model's maximum")
    return length


def scored_choices(model, tokenizer, requests: list[dict], batch: int) -> list[dict]:
    """Score the choices of requests; print their log-likelihoods and the number of correct answers.

    Returns the requests, with lists log_likelihoods, tokens and greedy that have one value per
    choice.
    """
    pairs = [(request["context"], choice) for request in requests for choice in request["choices"]]
    with count_bar(len(pairs), "score", "choices") as bar:
        scores = iter(score_choices(model, tokenizer, pairs, batch=batch, progress=bar.update))
    right, lines = [], []
    for request in requests:
        likelihoods, tokens, greedy = zip(*(next(scores) for _ in request["choices"]), strict=True)
        lines.append(
            {**request, "log_likelihoods": likelihoods, "tokens": tokens, "greedy": greedy}
        )
        print_rank_0("  ".join(f"{value:.4f}" for value in likelihoods))
        if "answer" in request:
            right.append(likelihoods.index(max(likelihoods)) == request["answer"])
    if right:
        print_rank_0(f"right           {sum(right)} of {len(right)}: {sum(right) / len(right):.4f}")
    return lines


def classified(model, tokenizer, numbered: list[tuple[int, dict]], options: Options) -> list[dict]:
    """Classify the rows of a file; print the loss and the measures, and return the rows with
    prediction and scores.

    numbered: the rows, with their line numbers.

    Raises:
        UserError: The model is not a classifier, or a line has no text or an invalid label.
    """
    config = model.config
    if not config.num_labels:
        raise UserError(
            f"--labels: {options.source} is not a classifier (`megazoo pretrain --num-labels` "
            "trains one)"
        )
    told = [value["label"] for _, value in numbered if "label" in value]
    labels = labels_of(config.num_labels, config.problem_type, told[0] if told else None)
    rows, known = rows_of(tokenizer, numbered, labels, length_of(model, options), options.labels)
    parts, pad, size = [], config.pad_token_id, options.batch_size
    with count_bar(len(rows), "classify", "rows") as bar:
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            ids = pad_sequence(some, batch_first=True, padding_value=pad)
            parts.append(classify(model, ids).cpu())
            bar.update(len(some))
    logits = torch.cat(parts)
    print_rank_0(f"rows            {len(rows):,}, {len(known):,} of them with a label")
    if known:
        tell_how_right(logits[list(known)], list(known.values()), labels)
    found = predictions(logits, labels.problem)
    found = found.flatten() if labels.problem == REGRESSION and labels.num_labels == 1 else found
    return [
        {**value, "prediction": prediction, "scores": scores}
        for (_, value), prediction, scores in zip(
            numbered, found.tolist(), logits.tolist(), strict=True
        )
    ]


def rows_of(
    tokenizer, numbered: list[tuple[int, dict]], labels: Labels, length: int, file: Path | None
) -> tuple[list[torch.Tensor], dict[int, list[float]]]:
    """Return the token ids of each row, truncated to `length`, and the labels by row number.

    Raises UserError with the line of the file that is invalid.
    """
    rows, known = [], {}
    for number, value in numbered:
        try:
            if "label" in value:
                known[len(rows)] = labels.numbers(value["label"])
            ids, pair = encode_texts(tokenizer, value)
        except (ValueError, UserError) as error:
            raise UserError(f"{file}, line {number}: {error}") from error
        kept = kept_tokens(len(ids), len(pair), len(tokenizer.before), length)
        rows.append(torch.tensor([*ids[: kept[0]], *pair[: kept[1]]]))
    return rows, known


def tell_how_right(logits: torch.Tensor, numbers: list[list[float]], labels: Labels) -> None:
    """Print the loss of rows with labels, and the measures of their kind of labels.

    numbers: the label of each row, as numbers.
    """
    typed = torch.from_numpy(np.stack([labels.typed(np.array(label)) for label in numbers]))
    print_rank_0(
        f"loss            {float(loss_sum(logits, typed, labels.problem)) / typed.numel():.6f}"
    )
    found = Tally(*map(int, tally(logits, typed, labels.problem).tolist()))
    for name, value in measures_of(found, labels).items():
        print_rank_0(f"{name:<16}{value:.6f}")


def read_texts(file: Path, key: str, alone: bool = False) -> list[bytes]:
    """Read the documents of a file, in UTF-8. alone: only this rank reads it; it may be a pipe."""
    if file.suffix != ".jsonl":
        return [_read(file, alone)]
    texts = []
    for number, value in _json_lines(file, alone):
        if not isinstance(value.get(key), str):
            problem = f"{file}, line {number} has no text with the key {key!r}"
            if "messages" in value:
                problem += (
                    ": it is a conversation. For the loss on its answers, train with it as "
                    "validation data (--split, --eval-steps); --choices scores given answers"
                )
            raise UserError(problem)
        texts.append(value[key].encode(errors="surrogatepass"))
    return texts


def read_choices(file: Path, alone: bool = False) -> list[dict]:
    """Read the requests of a JSONL file; UserError for an invalid line. alone: see `read_texts`."""
    requests = []
    for number, value in _json_lines(file, alone):
        choices = value.get("choices")
        are_texts = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
        if not isinstance(value.get("context"), str) or not choices or not are_texts:
            raise UserError(
                f'{file}, line {number} is not {{"context": "...", "choices": ["...", ...]}}'
            )
        if "answer" in value and value["answer"] not in range(len(choices)):
            raise UserError(
                f"{file}, line {number}: answer {value['answer']!r} is not the index of a choice"
            )
        requests.append(value)
    return requests


def _json_lines(file: Path, alone: bool) -> Iterator[tuple[int, dict]]:
    """Yield the objects of a JSONL file, with their line numbers; UserError if it has none."""
    lines = [(n, line) for n, line in enumerate(_read(file, alone).splitlines(), 1) if line.strip()]
    for number, line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise UserError(f"{file}, line {number} is not a JSON object")
        yield number, value
    if not lines:
        raise UserError(f"{file} has no lines")


def _read(file: Path, alone: bool) -> bytes:
    try:
        return without_mark(regular_file(file, or_pipe=alone).read_bytes())
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from error
