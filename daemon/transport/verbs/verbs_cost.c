/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cost of moving a plan: a request of so many bytes takes request_ns to post and
 * complete; or copy_ns to copy its bytes into a slice, at each end. Both are measured,
 * and a busy host, which can only make a measurement longer, must not decide for good:
 *
 *   copying    when the transport opens, in CPU time of the thread, the least of several
 *              trials: it excludes time in which others had the core.
 *   a request  by PROBES empty requests when a transfer to a peer is posted that might be
 *              packed. The adapter works while this thread does not run, so CPU time does
 *              not measure it: the least of the last VERBS_METER_KEPT measurements
 * counts. The first ones are consecutive, later ones AGAIN_NS apart, so that neither a
 *              lucky nor an unlucky figure stays. Before the first it is REQUEST_NS.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/transport/verbs/verbs_pool.h"

#define REQUEST_NS 150.0 /* until it is measured: a published value */
#define PROBES 256u
#define TRIALS 8u
#define AGAIN_NS (5 * LOOP_NS_PER_S)

static uint64_t thread_ns(void)
{
	return clock_of(CLOCK_THREAD_CPUTIME_ID);
}

static uint64_t copy_trial(uint64_t (*time_ns)(void), uint8_t *memory, uint64_t row)
{
	const uint64_t half = VERBS_POOL_BYTES / 2, count = (UINT64_C(64) << 10) / row;
	uint64_t best = UINT64_MAX;

	for (unsigned int trial = 0; trial < TRIALS; trial++) {
		uint64_t begin = time_ns(), took;

		for (uint64_t i = 0; i < count; i++)
			memcpy(memory + half + i * row, memory + i * row * 3 / 2, row);
		took = time_ns() - begin;
		best = took < best ? took : best;
	}
	return best / count;
}

/* Of one row, and of each byte in it: short rows and long ones. */
void verbs_cost_learn(struct verbs_transport *transport, uint8_t *memory,
		      uint64_t (*time_ns)(void))
{
	double few, many;

	if (!time_ns)
		time_ns = thread_ns;
	few = (double)copy_trial(time_ns, memory, 64);
	many = (double)copy_trial(time_ns, memory, 4096);
	transport->copy_byte_ns = many > few ? (many - few) / (4096 - 64) : 0;
	transport->copy_row_ns = few - 64 * transport->copy_byte_ns;
	if (transport->copy_row_ns < 1)
		transport->copy_row_ns = 1;
}

double verbs_cost_copy_ns(const struct verbs_transport *transport, uint32_t row)
{
	return transport->copy_row_ns + row * transport->copy_byte_ns;
}

bool verbs_meter_due(const struct verbs_meter *meter, uint64_t now_ns)
{
	return !meter->begin_ns && now_ns >= meter->next_ns;
}

void verbs_meter_begin(struct verbs_meter *meter, uint64_t now_ns)
{
	meter->begin_ns = now_ns;
}

void verbs_meter_end(struct verbs_meter *meter, uint64_t now_ns, uint32_t requests)
{
	double took = (double)(now_ns - meter->begin_ns) / requests;

	meter->kept[meter->count++ % VERBS_METER_KEPT] = took;
	meter->begin_ns = 0;
	if (meter->count >= VERBS_METER_KEPT)
		meter->next_ns = now_ns + AGAIN_NS;
}

double verbs_meter_ns(const struct verbs_meter *meter)
{
	double least = meter->kept[0];

	for (uint32_t i = 1; i < meter->count && i < VERBS_METER_KEPT; i++)
		least = meter->kept[i] < least ? meter->kept[i] : least;
	return least;
}

void verbs_cost_measure(struct verbs_peer *peer)
{
	struct verbs_qp *qp = &peer->qps[peer->qp_count - 1];
	uint64_t now_ns = loop_clock_ns(peer->net.timer.loop);
	struct ibv_send_wr wr[VERBS_CHAIN_WRS] = {{0}};
	struct verbs_sent entry = {.buffer = -1};

	if (peer->transport->request_ns || !verbs_meter_due(&peer->meter, now_ns) ||
	    sm_state(&qp->sm) != VERBS_QP_UP ||
	    qp->sq_free < PROBES + VERBS_SEND_BUFFERS || qp->sent_count)
		return;
	verbs_meter_begin(&peer->meter, now_ns);
	for (uint32_t i = 0; i < VERBS_CHAIN_WRS; i++) {
		wr[i].opcode = IBV_WR_RDMA_WRITE; /* of nothing */
		wr[i].next = i + 1 < VERBS_CHAIN_WRS ? &wr[i + 1] : NULL;
	}
	for (uint32_t done = 0; done < PROBES; done += VERBS_CHAIN_WRS) {
		entry.probe = done + VERBS_CHAIN_WRS == PROBES;
		if (verbs_qp_post(qp, wr, VERBS_CHAIN_WRS, &entry) < 0) {
			err_clear(); /* the queue pair has failed, with its own reason */
			verbs_cost_probed(peer, false);
			return;
		}
	}
}

void verbs_cost_probed(struct verbs_peer *peer, bool good)
{
	if (!good) { /* its queue pair has ended */
		peer->meter.begin_ns = 0;
		return;
	}
	verbs_meter_end(&peer->meter, loop_clock_ns(peer->net.timer.loop), PROBES);
	if (peer->meter.count > 1)
		return;
	log_info("verbs", peer->net.name, "a work request's cost",
		 "ns=%.0f copy_256_ns=%.0f", verbs_meter_ns(&peer->meter),
		 verbs_cost_copy_ns(peer->transport, 256));
}

double verbs_cost_request_ns(const struct verbs_peer *peer)
{
	if (peer->transport->request_ns)
		return peer->transport->request_ns;
	return peer->meter.count ? verbs_meter_ns(&peer->meter) : REQUEST_NS;
}
