/* SPDX-License-Identifier: Apache-2.0 */
/*
 * top: what a daemon told at one moment, and what is seen from several such answers:
 * rates from the last two, quantiles and failures a minute from the oldest that is kept
 * (a minute old at most).
 */
#ifndef KVD_CTL_TOP_H
#define KVD_CTL_TOP_H

#include <stdbool.h>
#include <stddef.h>

#include "ctl/ctl.h"

#define TOP_KEPT 64u /* answers */
#define TOP_WINDOW_S 60.0
#define TOP_BUCKETS 32u /* of a histogram; a daemon has 24 */
#define TOP_STATES 8u

/* Counts up to `end`, the lower ones counted in. */
struct top_buckets {
	unsigned int count;
	double end[TOP_BUCKETS], n[TOP_BUCKETS];
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
	/* answers; NULL in older samples. `rooms` NULL: may not be asked for */
	cJSON *health, *peers, *rooms;
	char rooms_why[200];
};

struct top {
	struct ctl *ctl;
	bool failed;	     /* failed rooms instead of those that have not ended */
	unsigned long limit; /* rooms of an answer */
	char instance[33];   /* another one counts anew */
	char name[64], daemon[64];
	struct top_sample samples[TOP_KEPT]; /* a ring */
	unsigned int count, next;
	char why[400]; /* no answer; "" */
};

/* Ask the daemon; CTL_OK, or a code and top->why. The connection is made again when it
 * was lost. */
int top_look(struct top *top);
void top_fini(struct top *top);
/* The last, the one before it, the oldest within the window; NULL when there is none. */
const struct top_sample *top_now(const struct top *top);
const struct top_sample *top_before(const struct top *top);
const struct top_sample *top_oldest(const struct top *top);
/* NAN: nothing was counted in between; INFINITY: above all ends. */
double top_quantile(double q, const struct top_buckets *a, const struct top_buckets *b);

struct top_peer {
	const cJSON *json;
	const char *state;
	char name[80];
	double in, out, inflight; /* bytes a second; NAN: not known */
	double failed;		  /* a minute */
	double rooms;		  /* that have not ended; NAN: others are shown */
};

struct top_room {
	const cJSON *json;
	double age_ms, rate;
};

/* What a frame shows. Its strings live as long as the samples do not change. */
struct top_view {
	double ok, failed, in, out, cpu; /* a second; NAN: not known */
	double p50_s, p99_s, late_s;
	struct top_peer *peers;
	size_t peer_count;
	struct top_room *rooms; /* oldest first */
	size_t room_count;
	bool rooms_cut; /* there are more than were asked for */
};

/* `words`: only lines that have them; "" or NULL: all. 0 or -ENOMEM. */
int top_view_make(const struct top *top, const char *words, struct top_view *view);
void top_view_free(struct top_view *view);
cJSON *top_view_json(const struct top *top, const struct top_view *view);
/* Texts with a newline behind each line; "" when out of memory. columns 0: as wide as
 * they are. The head of what is shown, its peers, its rooms. */
char *top_head_text(const struct top *top, const struct top_view *view,
		    unsigned int columns);
char *top_peers_text(const struct top_view *view);
char *top_rooms_text(const struct top *top, const struct top_view *view,
		     unsigned int columns);

#endif
