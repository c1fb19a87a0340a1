"""What attention masks mean: proved on the ops that make them; masks that attention does not need are removed.

`predicates.py`         conditions on the place of an element, and their algebra
`meaning.py`            what an element of a tensor is, by its place
`meanings.py`           what each op makes of places: the abstract interpreter
`places.py`             views, as places in what they show
`known_values.py`       values of tensors that depend on no input
`by_value.py`           the same for tensors that are only known by their values
`grouped_heads.py`      keys and values that are repeated for the heads of a group
`packed_positions.py`   positions that start anew with each document
`mask_data.py`          document ids and padding, one row for each sample
`structure.py`          from a condition on (query, key) to a `MaskStructure`
`rewrite.py`            attention ops of a graph, written without what is known
`documents.py`          packed documents, which attention must not cross
"""

from .documents import check_documents
from .rewrite import dense_mask_notes, structure_masks

__all__ = ["check_documents", "dense_mask_notes", "structure_masks"]
