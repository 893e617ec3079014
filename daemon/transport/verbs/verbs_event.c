/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An adapter's reports, as messages that name device, port and peer, with their scope: a
 * work request's failure costs the connection (a reliable queue pair is in state ERR
 * afterwards), or only its rail, when the path failed and there is another one; a dead
 * device all connections over it, a port that is down nothing yet: it may recover before
 * the retries are used up.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

/* ---- work requests ---- */

static const struct {
	enum ibv_wc_status status;
	enum err_code code;
	const char *text;
} statuses[] = {
	{IBV_WC_RETRY_EXC_ERR, ERR_PEER,
	 "all retries timed out: the peer or the path to it is down"},
	{IBV_WC_RNR_RETRY_EXC_ERR, ERR_PROTO,
	 "the peer has no receive posted despite its credits"},
	{IBV_WC_REM_ACCESS_ERR, ERR_REVOKED,
	 "remote access error: the peer's key is no longer valid for that access"},
	{IBV_WC_REM_INV_REQ_ERR, ERR_PROTO,
	 "the peer's adapter rejected a request as invalid"},
	{IBV_WC_REM_OP_ERR, ERR_TRANSPORT,
	 "the peer's adapter could not execute a request"},
	{IBV_WC_REM_ABORT_ERR, ERR_PEER, "the peer aborted the connection"},
	{IBV_WC_LOC_PROT_ERR, ERR_INTERNAL,
	 "local protection error: a local key does not cover its memory"},
	{IBV_WC_LOC_LEN_ERR, ERR_PROTO, "a message longer than its receive"},
	/* rxe reports this, too, when its interface goes down during a request */
	{IBV_WC_LOC_QP_OP_ERR, ERR_TRANSPORT,
	 "a request that this adapter cannot execute"},
	{IBV_WC_LOC_ACCESS_ERR, ERR_INTERNAL, "local access error"},
	{IBV_WC_FATAL_ERR, ERR_IO, "the adapter is broken"},
	{IBV_WC_WR_FLUSH_ERR, ERR_PEER, "the connection broke"},
};

/* Its event may arrive later than the failed requests, which some adapters (rxe) report
 * as local faults. */
static bool port_is_down(const struct verbs_rail *rail)
{
	struct verbs_device *device = rail->device;
	struct ibv_port_attr attr = {0};

	return device->transport->lib->query_port(device->context, rail->port, &attr) !=
		       0 ||
	       attr.state != IBV_PORT_ACTIVE;
}

const char *verbs_wc_text(enum ibv_wc_status status)
{
	for (size_t i = 0; i < ARRAY_LEN(statuses); i++)
		if (statuses[i].status == status)
			return statuses[i].text;
	return "a request failed";
}

bool verbs_wc_err(const struct verbs_qp *qp, const struct ibv_wc *wc, struct err *err_p)
{
	enum err_code code = ERR_TRANSPORT;
	const char *text = verbs_wc_text(wc->status);
	bool down = port_is_down(qp->rail);

	for (size_t i = 0; i < ARRAY_LEN(statuses); i++)
		if (statuses[i].status == wc->status)
			code = statuses[i].code;
	if (down) {
		code = ERR_IO;
		text = "the port is down";
	}
	err_set(err_p, code,
		"verbs: %s to %s, queue pair %u: %s (status %d, vendor 0x%x)",
		qp->rail->name, qp->peer->net.name, qp->index, text, (int)wc->status,
		wc->vendor_err);
	err_p->scope = ERR_SCOPE_PEER;
	err_p->retryable = true;
	return down || wc->status == IBV_WC_RETRY_EXC_ERR ||
	       wc->status == IBV_WC_WR_FLUSH_ERR;
}

/* ---- asynchronous events ---- */

static void fail_all(struct verbs_device *device, const char *text)
{
	struct verbs_transport *transport = device->transport;
	struct verbs_peer *peer;
	struct err err;

	list_foreach(peer, &transport->net.peers, net.link) {
		for (uint32_t i = 0; i < peer->qp_count; i++) {
			if (peer->qps[i].rail->device != device)
				continue;
			err_set(&err, ERR_IO, "verbs: %s, with the connection to %s: %s",
				device->name, peer->net.name, text);
			net_peer_fail(&peer->net, &err);
			break;
		}
	}
}

static void on_port(struct verbs_device *device, unsigned int port, bool down)
{
	for (uint32_t i = 0; i < device->transport->rail_count; i++) {
		struct verbs_rail *rail = &device->transport->rails[i];

		if (rail->device != device || rail->port != port || rail->down == down)
			continue;
		rail->down = down;
		if (down)
			log_warn("verbs", rail->name, "port is down",
				 "effect=\"connections over it end when their retries "
				 "do\"");
		else
			log_info("verbs", rail->name, "port is active", "port=%u", port);
	}
}

static void on_qp(struct ibv_qp *ibv_qp, bool path, const char *text)
{
	struct verbs_qp *qp = ibv_qp->qp_context;
	struct err err;

	if (!qp)
		return; /* a loop-back's: its READs fail, and report it */
	err_set(&err, ERR_TRANSPORT, "verbs: %s to %s, queue pair %u: %s", qp->rail->name,
		qp->peer->net.name, qp->index, text);
	if (path)
		verbs_rail_fail(qp, &err);
	else
		net_peer_fail(&qp->peer->net, &err);
}

static void verbs_event_take(struct verbs_device *device,
			     const struct ibv_async_event *event)
{
	const struct verbs_lib *lib = device->transport->lib;
	struct verbs_qp *qp;

	switch (event->event_type) {
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_PORT_ACTIVE:
		on_port(device, (unsigned int)event->element.port_num,
			event->event_type == IBV_EVENT_PORT_ERR);
		return;
	case IBV_EVENT_DEVICE_FATAL:
		device->fatal = true;
		log_error("verbs", device->name, "device removed", "type=%d",
			  (int)event->event_type);
		fail_all(device, "the device was removed or reset");
		return;
	case IBV_EVENT_COMM_EST: /* its first message overtook the last handshake */
		qp = event->element.qp->qp_context;
		if (qp && qp->id)
			lib->notify(qp->id, IBV_EVENT_COMM_EST);
		return;
	case IBV_EVENT_QP_FATAL:
		on_qp(event->element.qp, true,
		      "the adapter reports a fatal error (QP fatal)");
		return;
	case IBV_EVENT_QP_REQ_ERR:
		on_qp(event->element.qp, false, "invalid request received");
		return;
	case IBV_EVENT_QP_ACCESS_ERR:
		on_qp(event->element.qp, false,
		      "request received for memory that may not be accessed");
		return;
	case IBV_EVENT_PATH_MIG_ERR:
		on_qp(event->element.qp, true, "its path could not migrate");
		return;
	case IBV_EVENT_CQ_ERR:
		fail_all(device, "completion queue overrun");
		return;
	default: /* LID, GID, SM, P_Key changes, path migrated, last WQE: no harm */
		log_info("verbs", device->name, "event", "type=%d",
			 (int)event->event_type);
	}
}

/* Acknowledged before it is acted on: destroying a queue pair waits for the
 * acknowledgement of its events. Its memory belongs to this daemon, so it is still
 * valid. */
void verbs_on_async(struct loop_fd *watch, int events)
{
	struct verbs_device *device =
		container_of(watch, struct verbs_device, async_watch);
	const struct verbs_lib *lib = device->transport->lib;
	struct ibv_async_event event, copy;

	(void)events;
	while (lib->get_async_event(device->context, &event) == 0) {
		copy = event;
		lib->ack_async_event(&event);
		verbs_event_take(device, &copy);
	}
}
