/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events of libzmq 4.3 at the side that dials, and its reaction:
 *
 *   the other side's key checker refuses our key     FAILED_AUTH 400; the socket is dead
 *   one side has keys, the other has none            FAILED_PROTOCOL at the side that
 *                                                    reads first, whose socket is dead;
 *                                                    FAILED_NO_DETAIL, EPIPE at the other
 *   the other side has another key than we expect    FAILED_NO_DETAIL, EPIPE
 *   no listener, no route                            CONNECT_RETRIED
 *
 * A dead socket never connects again, so these end the line, and its owner dials again.
 * libzmq retries the others every 20 ms to 1 s. The greeting distinguishes the second row
 * from the third. In the third, a closed connection may also be a daemon that is
 * stopping, so three closed connections in a row, and a greeting in between, are
 * required.
 */
#include "daemon/link/link_diag.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/link/link_curve.h"
#include "daemon/link/link_monitor.h"
#include "daemon/link/link_probe.h"
#include "daemon/loop/loop.h"

#define EVENTS                                                                   \
	(ZMQ_EVENT_HANDSHAKE_FAILED_AUTH | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | \
	 ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_CONNECT_RETRIED)
#define PROBE_EVERY_NS (2 * LOOP_NS_PER_S)
#define CLOSED_ENOUGH 3u
#define UNKNOWN_ENOUGH 2u

struct link_diag {
	struct link_diag_args args;
	struct link_monitor *monitor;
	struct link_probe *probe;
	uint64_t probed_ns;	 /* 0: never */
	unsigned int closed;	 /* consecutive handshakes closed by the other side */
	bool alike;		 /* the greeting shows that both have keys, or neither */
	bool unlike;		 /* libzmq reports that only one side has keys */
	struct loop_timer again; /* for a line whose key is unknown */
	char address[LINK_ENDPOINT_MAX], expected[CURVE_KEY_CHARS + 1];
	struct err why; /* to be reported */
	bool final;
	struct loop_defer report;
};

/* In the next step of the loop, since the callback may free us. A final reason is not
 * replaced. */
static void diag_report(struct link_diag *diag, bool final, enum err_code code,
			const char *text)
{
	if (diag->final)
		return;
	err_set(&diag->why, code, "%s", text);
	diag->final = final;
	loop_defer(diag->args.loop, &diag->report);
}

static void on_report(struct loop_defer *defer)
{
	struct link_diag *diag = container_of(defer, struct link_diag, report);
	struct err why = diag->why;

	diag->args.on_diagnosis(diag->args.owner, &why, diag->final);
}

/* ---- texts ---- */

static void report_refused(struct link_diag *diag)
{
	char text[ERR_TEXT_MAX];

	snprintf(text, sizeof(text),
		 "refuses this daemon's key; on its host add the line '%.170s' to its "
		 "curve_allow_file and reload it",
		 diag->args.line);
	diag_report(diag, true, ERR_AUTH, text);
}

static void report_mechanism(struct link_diag *diag, bool other_has_keys)
{
	diag_report(diag, true, ERR_AUTH,
		    other_has_keys ? "has CURVE keys, this daemon has none; set "
				     "insecure = no here"
				   : "has no CURVE keys, this daemon has; set "
				     "insecure = no on its host");
}

static void report_other_key(struct link_diag *diag)
{
	char text[ERR_TEXT_MAX];

	snprintf(text, sizeof(text),
		 "does not have the expected CURVE key %s; correct its line in "
		 "curve_allow_file, or the endpoint",
		 diag->expected);
	diag_report(diag, true, ERR_AUTH, text);
}

static void report_address(struct link_diag *diag, bool final, const char *what)
{
	char text[ERR_TEXT_MAX];

	snprintf(text, sizeof(text), "cannot be reached: %s: %s",
		 diag->address + strlen("tcp://"), what);
	diag_report(diag, final, ERR_PEER, text);
}

/* There is no connection, so each check is a probe. The first may have been made
 * before a starting daemon of this user has published its key. */
static void report_unknown_key(struct link_diag *diag)
{
	char text[ERR_TEXT_MAX];

	if (diag->args.queried) {
		diag_report(diag, false, ERR_PEER,
			    "has a key that is neither in curve_allow_file nor, so far, "
			    "in the directory; the daemon publishes it there with "
			    "cluster_trust = directory");
		return;
	}
	snprintf(text, sizeof(text),
		 "has a key that is not known here; append '#' and its key to the "
		 "endpoint, or add its line, NAME KEY %.100s, to curve_allow_file here "
		 "(kvd-ctl keys prints it there)",
		 diag->address + strlen("tcp://"));
	diag_report(diag, ++diag->closed >= UNKNOWN_ENOUGH, ERR_AUTH, text);
}

/* ---- the probe ---- */

static void check_closed(struct link_diag *diag)
{
	if (!diag->alike || diag->closed < CLOSED_ENOUGH)
		return;
	if (diag->args.curve)
		report_other_key(diag);
	else
		report_address(diag, false,
			       "connections are closed during ZeroMQ's handshake");
}

static void diag_on_found(void *owner, enum probe_found found, int no)
{
	struct link_diag *diag = owner;

	link_probe_free(diag->probe);
	diag->probe = NULL;
	if (diag->unlike) {
		report_mechanism(diag, !diag->args.curve);
	} else if (found == PROBE_ERRNO) {
		diag->closed = 0;
		report_address(diag, false, err_connect_words(no));
	} else if (found == PROBE_CLOSED) {
		report_address(diag, false, "connections are closed without a greeting");
	} else if (found == PROBE_SILENT) {
		report_address(diag, false, "connections are accepted but not answered");
	} else if (found == PROBE_NOT_ZMTP) {
		report_address(diag, true, "the service on this port is not kvd");
	} else if ((found == PROBE_CURVE) != diag->args.curve) {
		report_mechanism(diag, found == PROBE_CURVE);
	} else if (diag->args.curve && !*diag->expected) {
		report_unknown_key(diag);
	} else {
		diag->alike = true;
		check_closed(diag);
	}
}

static void diag_probe(struct link_diag *diag)
{
	uint64_t now_ns = loop_now_ns(diag->args.loop);

	if (diag->probe || !*diag->address || diag->final ||
	    (diag->probed_ns && now_ns - diag->probed_ns < PROBE_EVERY_NS))
		return;
	diag->probed_ns = now_ns;
	if (link_probe_new(diag->args.loop, diag->address, diag->args.curve,
			   diag_on_found, diag, &diag->probe) < 0)
		err_clear(); /* another time */
}

static void diag_on_again(struct loop_timer *timer)
{
	struct link_diag *diag = container_of(timer, struct link_diag, again);

	diag_probe(diag);
	loop_timer_start(timer, PROBE_EVERY_NS);
}

/* ---- events of libzmq ---- */

static void on_protocol(struct link_diag *diag, uint32_t value)
{
	char text[80];

	if (value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) {
		/* the other side may have seen only the end of a connection: the probe
		 * sends our mechanism */
		diag->unlike = true;
		diag_probe(diag);
		if (!diag->probe)
			report_mechanism(diag, !diag->args.curve);
	} else if (value == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC) {
		report_other_key(diag);
	} else {
		snprintf(text, sizeof(text), "violates ZeroMQ's handshake (0x%x)", value);
		report_address(diag, true, text);
	}
}

static void diag_on_event(void *owner, int event, uint32_t value)
{
	struct link_diag *diag = owner;

	if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) {
		report_refused(diag);
	} else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) {
		on_protocol(diag, value);
	} else {
		if (event == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL)
			diag->closed = value == EPIPE || value == ECONNRESET
					       ? diag->closed + 1
					       : 0;
		diag_probe(diag);
		check_closed(diag);
	}
}

/* ---- for the link ---- */

int link_diag_new(const struct link_diag_args *args, struct link_diag **diag_p)
{
	struct link_diag *diag = mem_zalloc(sizeof(*diag));
	int r;

	if (!diag)
		return err_pass(-ENOMEM);
	diag->args = *args;
	if (args->expected)
		snprintf(diag->expected, sizeof(diag->expected), "%s", args->expected);
	loop_defer_init(&diag->report, on_report);
	loop_timer_init(&diag->again, args->loop, diag_on_again);
	r = link_monitor_new(args->loop, args->context, args->socket, EVENTS,
			     diag_on_event, diag, &diag->monitor);
	if (r < 0) {
		mem_free(diag);
		return err_pass(r);
	}
	*diag_p = diag;
	return 0;
}

void link_diag_address(struct link_diag *diag, const char *address)
{
	if (!diag || strcmp(diag->address, address) == 0)
		return;
	link_probe_free(diag->probe);
	diag->probe = NULL;
	diag->probed_ns = 0;
	diag->closed = 0;
	diag->alike = diag->unlike = false;
	snprintf(diag->address, sizeof(diag->address), "%s", address);
	if (diag->args.curve && !*diag->expected)
		loop_timer_start(&diag->again, 0);
}

void link_diag_name(struct link_diag *diag, const char *host, const char *why)
{
	char text[ERR_TEXT_MAX];

	if (!diag)
		return;
	snprintf(text, sizeof(text), "cannot be reached: %.127s: %.100s", host, why);
	diag_report(diag, false, ERR_PEER, text);
}

void link_diag_free(struct link_diag *diag)
{
	if (!diag)
		return;
	loop_defer_cancel(&diag->report);
	loop_timer_stop(&diag->again);
	link_probe_free(diag->probe);
	link_monitor_free(diag->monitor);
	mem_free(diag);
}
