/* SPDX-License-Identifier: Apache-2.0 */
/* release: a reference on memory dropped on the loop, without unmapping there. */
#ifndef KVD_TRANSPORT_RELEASE_H
#define KVD_TRANSPORT_RELEASE_H

struct memory;
struct offload;

/* What could unmap goes to a helper. */
void memory_release(struct offload *offload, struct memory *memory);

#endif
