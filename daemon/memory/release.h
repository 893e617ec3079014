/* SPDX-License-Identifier: Apache-2.0 */
/* release: what takes long with memory, asked for by the loop and done by a helper. */
#ifndef KVD_TRANSPORT_RELEASE_H
#define KVD_TRANSPORT_RELEASE_H

struct memory;
struct offload;

/* What could unmap goes to a helper. */
void memory_release(struct offload *offload, struct memory *memory);
/* Its pages are had beforehand, as far as they can be; it may be used meanwhile. */
void memory_fill(struct offload *offload, struct memory *memory);

#endif
