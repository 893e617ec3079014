/* SPDX-License-Identifier: Apache-2.0 */
/* release: slow operations on memory, requested by the loop and done by a helper. */
#ifndef KVD_TRANSPORT_RELEASE_H
#define KVD_TRANSPORT_RELEASE_H

struct memory;
struct offload;

/* A reference whose drop could unmap is passed to a helper. */
void memory_release(struct offload *offload, struct memory *memory);
/* Allocates its pages in advance, if possible; it may be used meanwhile. */
void memory_fill(struct offload *offload, struct memory *memory);

#endif
