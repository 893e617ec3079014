/* SPDX-License-Identifier: Apache-2.0 */
/*
 * top: samples of a daemon, and values derived from them: rates from the last two
 * samples, quantiles and failures per minute from the last sample and the oldest one
 * within the window of a minute.
 */
#ifndef KVD_CTL_TOP_H
#define KVD_CTL_TOP_H

#include <stdbool.h>
#include <stddef.h>

#include "ctl/ctl.h"

#define TOP_KEPT 64u /* samples */
#define TOP_WINDOW_S 60.0
#define TOP_BUCKETS 24u /* of a histogram */
#define TOP_STATES 8u

struct top_buckets {
	double first, n[TOP_BUCKETS]; /* i ends at first * 2^i, the last one never */
};

struct top_failed {
	char peer[96]; /* instance, else endpoint */
	double rooms;
};

struct top_sample {
	double at_s;
	/* of the metrics */
	double ok, failed, in, out, cpu_s, rss;
	struct {
		char name[24];
		double count;
	} states[TOP_STATES]; /* rooms */
	unsigned int state_count;
	struct top_buckets phase, late;
	struct top_failed *peers_failed;
	size_t peers_failed_count;
	/* replies; NULL in older samples. `rooms` NULL: no permission */
	cJSON *health, *peers, *rooms;
	char rooms_why[200];
};

struct top {
	struct ctl *ctl;
	unsigned long limit; /* rooms in a reply */
	char instance[33];   /* a new one resets the samples */
	char name[64], daemon[64];
	struct top_sample samples[TOP_KEPT]; /* a ring */
	unsigned int count, next;
	char why[400]; /* error of the last sample; "" */
};

/* Take a sample; CTL_OK, or a code and top->why. Reconnects if the connection was
 * lost. */
int top_look(struct top *top);
void top_fini(struct top *top);
/* The last sample, the one before it, the oldest within the window; NULL: none. */
const struct top_sample *top_now(const struct top *top);
const struct top_sample *top_before(const struct top *top);
const struct top_sample *top_oldest(const struct top *top);
/* NAN: no events between a and b; INFINITY: above the last bound. */
double top_quantile(double q, const struct top_buckets *a, const struct top_buckets *b);

struct top_peer {
	const cJSON *json;
	const char *state;
	char name[80];
	double in, out;	 /* bytes per second; NAN: not known */
	double inflight; /* bytes */
	double failed;	 /* rooms per minute */
	double rooms;	 /* in progress; NAN: no permission */
};

struct top_room {
	const cJSON *json;
	double age_ms, rate;
};

/* The contents of a frame. Its strings are valid until the next sample. */
struct top_view {
	double ok, failed, in, out, cpu; /* per second; NAN: not known */
	double p50_s, p99_s, late_s;
	struct top_peer *peers;
	size_t peer_count;
	struct top_room *rooms; /* oldest first */
	size_t room_count;
	bool rooms_cut; /* the limit was reached */
};

/* 0 or -ENOMEM. */
int top_view_make(const struct top *top, struct top_view *view);
void top_view_free(struct top_view *view);
cJSON *top_view_json(const struct top *top, const struct top_view *view);
/* Text of the head, the peers and the rooms, each line with a newline; "" when out of
 * memory. columns 0: no limit. */
char *top_head_text(const struct top *top, const struct top_view *view,
		    unsigned int columns);
char *top_peers_text(const struct top_view *view);
char *top_rooms_text(const struct top_view *view, unsigned int columns);

#endif
