/* SPDX-License-Identifier: Apache-2.0 */
/*
 * page_status: what the page shows beyond the metrics: rooms that are open, rooms that
 * failed, and peers, each with its reason. No metric has it, since its labels would have
 * no bound. With metrics_rooms = no it is empty, since readers are not authenticated.
 */
#ifndef KVD_METRICS_PAGE_STATUS_H
#define KVD_METRICS_PAGE_STATUS_H

#include "daemon/base/text.h"
#include "daemon/loop/loop.h"

#define PAGE_STATUS_REPLIES 3u

struct kvd;
struct session;

struct page_status {
	struct kvd *kvd;
	/* From now to the next take, any thread may read `reply` and `shown`. */
	void (*on_taken)(struct page_status *status);
	struct text reply[PAGE_STATUS_REPLIES]; /* of control commands; empty: none */
	bool shown;				/* metrics_rooms */
	/* private to the loop */
	struct session *session; /* NULL: no take is in progress */
	unsigned int at;	 /* the reply that is awaited */
	struct loop_defer next;
};

void page_status_init(struct page_status *status, struct kvd *kvd,
		      void (*on_taken)(struct page_status *status));
void page_status_fini(struct page_status *status);
/* The loop's: fill `reply`, a piece in each turn; then on_taken(). */
void page_status_take(struct page_status *status);
/* The server's thread, between two takes: a JSON object. */
void page_status_json(const struct page_status *status, struct text *out);

#endif
