"""cuVS' CAGRA, which the pool's search on a GPU is compared with (cuVS 26.10, ``cagra.pyx``)."""

from __future__ import annotations

import numpy as np
import torch
from cuvs.neighbors import cagra
from numpy.typing import NDArray

from ppd.ann.space import Rows

from .cards import Find

_AT_LEAST = 32  # its itopk is a multiple of this
_SAMPLINGS = 8  # rounds of random first nodes; with the default of 1 recall is poor


def cagra_search(rows: torch.Tensor, limit: int, degree: int, dtype: torch.dtype) -> Find:
    """Build an index of rows, and return its search.

    Args:
        rows: (n, dimensions) float32, on the device.
        limit: number of nodes to find.
        degree: neighbours of a node, chosen from twice as many, as the pool's.
        dtype: of the rows that are searched.
    """
    dataset = rows.to(dtype)
    index = cagra.build(
        cagra.IndexParams(
            metric="sqeuclidean",
            graph_degree=degree,
            intermediate_graph_degree=2 * degree,
            build_algo="nn_descent",
        ),
        dataset,
    )

    def find(queries: Rows, width: int, threads: int) -> NDArray[np.int64]:
        params = cagra.SearchParams(
            itopk_size=-(-width // _AT_LEAST) * _AT_LEAST, num_random_samplings=_SAMPLINGS
        )
        there = torch.from_numpy(queries).to(dataset.device, dtype)
        nodes = cagra.search(params, index, there, limit)[1]
        return np.asarray(nodes.copy_to_host(), np.int64)

    return find
