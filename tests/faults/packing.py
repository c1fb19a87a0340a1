"""Faults of packed documents: a label, a position, a mask or a resumed run crosses a border."""

from .fault import Fault

DATA, PARITY = "data/test_packing.py", "parity/test_packed.py"

PACKING = (
    Fault(
        "the first token of a document is predicted from the one before it",
        "data/packing.py",
        "border = torch.tensor([IGNORED])",
        "border = piece.labels[:1]",
        f"{DATA}::test_a_sequence_has_documents_positions_and_labels_that_start_anew",
    ),
    Fault(
        "positions go on after a document",
        "data/packing.py",
        "torch.cat([torch.arange(size) for size in sizes])",
        "torch.arange(packing.length)",
        f"{DATA}::test_every_token_that_has_a_label_is_in_one_sequence",
    ),
    Fault(
        "a run resumes at the start of a window",
        "data/packing.py",
        "for pieces in bins[self._sequences :]:",
        "for pieces in bins:",
        f"{DATA}::test_a_stateful_stream_is_not_read_from_the_start",
    ),
    Fault(
        "a resumed run leaves a window out",
        "data/packing.py",
        "[start:].tolist()",
        "[start + self._sequences :].tolist()",
        f"{DATA}::test_a_stop_anywhere_on_another_number_of_ranks[map]",
    ),
    Fault(
        "what a long document has left is lost",
        "data/packing.py",
        'range(0, len(ids), self.length) if self.long == "split"',
        'range(0, len(ids) - self.length + 1, self.length) if self.long == "split"',
        f"{DATA}::test_every_token_that_has_a_label_is_in_one_sequence",
    ),
    Fault(
        "attention without a mask across documents is let through",
        "capture/masks/documents.py",
        "if not isinstance(mask, ValueRef) or mask.name not in derived:",
        "if isinstance(mask, ValueRef) and mask.name not in derived:",
        f"{PARITY}::test_a_plain_model_that_ignores_documents_is_refused_with_its_line",
    ),
    Fault(
        "attention with a mask across documents is let through",
        "capture/masks/documents.py",
        "or mask.name not in derived:",
        "or not derived:",
        f"{PARITY}::test_a_model_of_transformers_with_a_cache_would_cross_documents_and_is_refused",
    ),
    Fault(
        "a recurrent layer across documents is let through",
        "capture/masks/documents.py",
        "return width > 1 and tokens <= source < tokens + width",
        "return width > 1 and tokens < source < tokens",
        f"{PARITY}::test_models_that_make_no_mask_of_positions_are_refused[recurrent_gemma]",
    ),
)
