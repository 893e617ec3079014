/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/xfer_pair.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hex.h"

uint64_t pair_attach(struct pair *p, struct session *from, struct session *to,
		     unsigned int node)
{
	char secret[33];

	hex_write(to->secret, 16, secret);
	return cluster_number(
		cluster_call(&p->c, from,
			     "{'cmd':'peer.attach','endpoint':'%s','session':'%llu',"
			     "'secret':'%s'}",
			     p->c.nodes[node].endpoint, (unsigned long long)to->epoch,
			     secret),
		"attach");
}

static void setup_on(struct pair *p, unsigned int target)
{
	cluster_new(&p->c, 1, 2);
	p->me = cluster_engine(&p->c, 0, "me");
	p->you = cluster_engine(&p->c, target, "you");
	p->mine = p->yours = (struct cache){.layers = 2,
					    .pages = 64,
					    .page_tokens = 1,
					    .units = 1,
					    .total_units = 1,
					    .unit_bytes = 256};
	cluster_cache(&p->c, p->me, "mine", 0, &p->mine);
	cluster_cache(&p->c, p->you, "yours", 0, &p->yours);
	for (uint64_t i = 0; i < p->mine.bytes; i++)
		p->mine.base[i] = (uint8_t)(1 + i % 251);
	p->attach = pair_attach(p, p->me, p->you, target);
}

int pair_setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	setup_on(p, 1);
	*state = p;
	return 0;
}

int pair_setup_one_daemon(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	setup_on(p, 0);
	*state = p;
	return 0;
}

int pair_teardown(void **state)
{
	struct pair *p = *state;

	cluster_free(&p->c);
	cache_close(&p->mine);
	cache_close(&p->yours);
	free(p);
	return 0;
}

uint64_t pair_rows(struct pair *p, bool local, uint64_t count)
{
	const struct cache *k = local ? &p->mine : &p->yours;
	char peer[40] = "";

	if (!local)
		snprintf(peer, sizeof(peer), "'peer':%llu,",
			 (unsigned long long)p->attach);
	return cluster_number(
		cluster_call(&p->c, p->me,
			     "{'cmd':'dlist.prep',%s'descs':[['%llu',256,256,%llu]]}",
			     peer, (unsigned long long)(uintptr_t)k->base,
			     (unsigned long long)count),
		"dlist");
}

/* A grid over the whole cache: 256 rows of 256 bytes. */
uint64_t pair_grid(struct pair *p, bool local)
{
	return pair_rows(p, local, p->mine.bytes / 256);
}

uint64_t pair_start(struct pair *p, const char *op, uint64_t local, uint64_t remote,
		    const char *rest)
{
	return cluster_number(
		cluster_call(
			&p->c, p->me,
			"{'cmd':'xfer.start','op':'%s','local':%llu,'remote':%llu%s}", op,
			(unsigned long long)local, (unsigned long long)remote, rest),
		"xfer");
}

unsigned int pair_state(struct pair *p, uint64_t xfer)
{
	return (unsigned int)cluster_number(
		cluster_call(&p->c, p->me, "{'cmd':'xfer.state','xfer':%llu}",
			     (unsigned long long)xfer),
		"state");
}

void pair_until(struct pair *p, uint64_t xfer, unsigned int state)
{
	for (int i = 0; i < 1000 && pair_state(p, xfer) != state; i++)
		cluster_run(&p->c, LOOP_NS_PER_MS);
	assert_int_equal(pair_state(p, xfer), state);
}

bool pair_row_is(const struct pair *p, unsigned int yours, unsigned int mine)
{
	return memcmp(p->yours.base + 256 * yours, p->mine.base + 256 * mine, 256) == 0;
}
