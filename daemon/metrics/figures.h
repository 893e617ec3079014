/* SPDX-License-Identifier: Apache-2.0 */
/*
 * figures: a copy of all metrics of the daemon at one moment. The loop makes it in some
 * microseconds, independent of the number of rooms; texts are formatted elsewhere.
 */
#ifndef KVD_METRICS_FIGURES_H
#define KVD_METRICS_FIGURES_H

#include "daemon/base/context.h"
#include "daemon/base/err.h"
#include "daemon/control/health.h"

struct text;

struct figures {
	struct metrics metrics;
	uint64_t cells[MODULES][METRIC_OWN_MAX]; /* those of modules */
	const char *transports[TRANSPORTS_MAX];	 /* names; NULL: none */
	const struct module *const *modules;	 /* the module that owns the values */
	char name[64];				 /* the daemon's */
	enum health health;
	char why[ERR_TEXT_MAX]; /* HEALTH_REFUSING, HEALTH_DEGRADED */
};

/* The loop's. */
void figures_take(struct kvd *kvd, struct figures *f);

/* ---- any thread, in this order ---- */
/* Values of this process from the kernel. */
void figures_read_process(struct figures *f);
/* For Prometheus: its text format 0.0.4. */
void figures_expose(const struct figures *f, struct text *out);
/* Members of a JSON object: "loop", "metrics". Series that never counted are omitted. */
void figures_json(const struct figures *f, struct text *out);

/* One family: a row, and the position of its cells. Calls each in turn: the daemon's,
 * then those of its modules. */
struct figures_family {
	const struct metric_row *row;
	const uint64_t *cells; /* NULL: a histogram */
};
void figures_families(const struct figures *f,
		      void (*each)(void *arg, const struct figures_family *family),
		      void *arg);
/* The name of a label's value; NULL: the number is not in use. */
const char *figures_label(const struct figures *f, enum metric_label label,
			  unsigned int which, unsigned int value);

#endif
