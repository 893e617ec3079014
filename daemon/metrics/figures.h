/* SPDX-License-Identifier: Apache-2.0 */
/*
 * figures: a copy of all that the daemon counts, of one moment. The loop makes it in
 * some microseconds, whatever the number of rooms; texts are made of it elsewhere.
 */
#ifndef KVD_METRICS_FIGURES_H
#define KVD_METRICS_FIGURES_H

#include "daemon/base/context.h"
#include "daemon/base/err.h"
#include "daemon/control/health.h"

struct text;

struct figures {
	struct metrics metrics;
	uint64_t cells[MODULES][METRIC_OWN_MAX]; /* modules' own */
	const char *transports[TRANSPORTS_MAX];	 /* names; NULL: none */
	const struct module *const *modules;	 /* whose figures these are */
	char name[64];				 /* the daemon's */
	enum health health;
	char why[ERR_TEXT_MAX]; /* HEALTH_REFUSING, HEALTH_DEGRADED */
};

/* The loop's. */
void figures_take(struct kvd *kvd, struct figures *f);

/* ---- any thread, in this order ---- */
/* What the kernel says of this process. */
void figures_read_process(struct figures *f);
/* For Prometheus: its text format 0.0.4, or OpenMetrics 1.0. */
void figures_expose(const struct figures *f, bool openmetrics, struct text *out);
/* Members of a JSON object, each after a comma: "loop", "metrics". Series that never
 * counted anything are left out. */
void figures_json(const struct figures *f, struct text *out);

/* One family: a row, and where its cells are counted from. Calls each in turn: the
 * daemon's, then those of its modules. */
struct figures_family {
	const struct metric_row *row;
	const uint64_t *cells; /* NULL: a histogram */
};
void figures_families(const struct figures *f,
		      void (*each)(void *arg, const struct figures_family *family),
		      void *arg);
/* What a label's value is called; NULL: nothing of that number is there. */
const char *figures_word(const struct figures *f, enum metric_label label,
			 unsigned int which, unsigned int value);

#endif
