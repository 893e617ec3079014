/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data port: one listening socket a daemon, for control lines and streams of
 * all peers.
 *
 * A connection is pending (net_acceptor.h) until it has proven its peer: a control line
 * by the tokens of the handshake, a stream by the secret from its control line
 * (tcp_keys.h). Each serves once: a peer that has a control line, a stream that is up, is
 * never replaced. A legitimate connection sends its hello before that many others have
 * connected after it.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"

#define BACKLOG 128
/* ---- identification ---- */

static bool waits_for_control(const struct tcp_peer *peer, const struct tcp_hello *hello)
{
	return !peer->net.dial && net_peer_live(&peer->net) &&
	       sm_state(&peer->net.sm) == NET_PEER_OPENING &&
	       hello->role == TCP_CONTROL && tcp_keys_named(&peer->keys, hello);
}

static int take_control(struct tcp_peer *peer, struct net_pending *pending,
			const struct tcp_hello *hello)
{
	int r = tcp_keys_take_control(&peer->keys, pending->hello);

	if (r == 0)
		tcp_join_control(peer, net_pending_take(pending), hello);
	return err_pass(r);
}

void tcp_accept_match(struct tcp_peer *peer)
{
	struct net_pending *pending;
	struct tcp_hello hello;

	list_foreach(pending, &peer->transport->acceptor.pendings, link) {
		if (!pending->complete || tcp_hello_get(pending->hello, &hello) < 0 ||
		    !waits_for_control(peer, &hello))
			continue;
		if (take_control(peer, pending, &hello) == 0)
			return;
		err_clear(); /* his time runs out */
	}
}

static int meet_control(struct net_pending *pending, const struct tcp_hello *hello)
{
	struct tcp_peer *peer;

	list_foreach(peer, &pending->acceptor->net->peers, net.link) {
		if (waits_for_control(peer, hello))
			return err_pass(take_control(peer, pending, hello));
	}
	return NET_PENDING_WAITS;
}

static int take_stream(struct tcp_peer *peer, struct net_pending *pending,
		       const struct tcp_hello *hello)
{
	uint8_t asked[TCP_HELLO_BYTES];
	struct tcp_stream *stream;
	int r = tcp_keys_take_stream(&peer->keys, pending->hello);

	if (r < 0)
		return err_pass(r);
	stream =
		hello->number < peer->stream_count ? &peer->streams[hello->number] : NULL;
	if (!stream || stream->up)
		return err_raise(ERR_PROTO, "tcp: unexpected stream %u", hello->number);
	memcpy(asked, pending->hello, sizeof(asked));
	tcp_join_stream(stream, net_pending_take(pending), asked);
	return 0;
}

/* The session exists before its dialer learns of it, so no stream arrives too early. */
static int meet_stream(struct net_pending *pending, const struct tcp_hello *hello)
{
	struct tcp_peer *peer;

	list_foreach(peer, &pending->acceptor->net->peers, net.link) {
		if (!peer->net.dial && net_peer_live(&peer->net) &&
		    sm_state(&peer->net.sm) == NET_PEER_JOINING &&
		    tcp_keys_session_named(&peer->keys, hello))
			return err_pass(take_stream(peer, pending, hello));
	}
	return err_raise(ERR_AUTH, "tcp: stream of an unknown session");
}

static int tcp_door_meet(struct net_pending *pending)
{
	struct tcp_hello hello;
	int r = tcp_hello_get(pending->hello, &hello);

	if (r < 0)
		return err_pass(r);
	switch (hello.role) {
	case TCP_CONTROL:
		return meet_control(pending, &hello);
	case TCP_STREAM:
		return meet_stream(pending, &hello);
	default:
		return err_raise(ERR_PROTO, "tcp: an answer without a request");
	}
}

static void tcp_door_want_tick(struct net_acceptor *acceptor)
{
	tcp_tick_want(container_of(acceptor, struct tcp_transport, acceptor));
}

/* ---- where it is ---- */

/* "tcp://127.0.0.1:0", "tcp://[::1]:5", "tcp://STAR:0"; false: not a number. */
static bool place_parse(const char *endpoint, union net_place *sa, bool *any_p)
{
	char host[CONFIG_ENDPOINT_BYTES];
	char *begin = host, *colon;
	uint16_t port;

	snprintf(host, sizeof(host), "%s",
		 strncmp(endpoint, "tcp://", 6) == 0 ? endpoint + 6 : endpoint);
	colon = strrchr(host, ':');
	if (!colon)
		return false;
	*colon = '\0';
	port = (uint16_t)strtoul(colon + 1, NULL, 10);
	if (*begin == '[') {
		begin++;
		begin[strcspn(begin, "]")] = '\0';
	}
	memset(sa, 0, sizeof(*sa));
	*any_p = strcmp(begin, "*") == 0;
	if (*any_p || inet_pton(AF_INET, begin, &sa->v4.sin_addr) == 1) {
		sa->v4.sin_family = AF_INET;
		sa->v4.sin_port = htons(port);
		*any_p |= sa->v4.sin_addr.s_addr == htonl(INADDR_ANY);
		return true;
	}
	if (inet_pton(AF_INET6, begin, &sa->v6.sin6_addr) != 1)
		return false;
	sa->v6.sin6_family = AF_INET6;
	sa->v6.sin6_port = htons(port);
	*any_p = IN6_IS_ADDR_UNSPECIFIED(&sa->v6.sin6_addr);
	return true;
}

static void tcp_accept_set_port(union net_place *sa, in_port_t port)
{
	if (sa->any.sa_family == AF_INET6)
		sa->v6.sin6_port = port;
	else
		sa->v4.sin_port = port;
}

static void add_place(struct tcp_address *address, const union net_place *sa)
{
	if (address->count < TCP_ADDRESSES_MAX)
		address->list[address->count++] = *sa;
}

static void freeifaddrsp(struct ifaddrs **list)
{
	if (*list)
		freeifaddrs(*list);
}

/* Bound to all addresses: send those of the interfaces that are up; the dialer tries one
 * after the other. */
static int places_of_interfaces(struct tcp_address *address, sa_family_t family,
				in_port_t port)
{
	mem_cleanup(freeifaddrsp) struct ifaddrs *list = NULL;
	union net_place sa;

	if (getifaddrs(&list) < 0)
		return err_raise_errno(errno, "tcp: getifaddrs");
	for (struct ifaddrs *i = list; i; i = i->ifa_next) {
		if (!i->ifa_addr || i->ifa_addr->sa_family != family ||
		    !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK))
			continue;
		memset(&sa, 0, sizeof(sa));
		memcpy(&sa, i->ifa_addr,
		       family == AF_INET6 ? sizeof(sa.v6) : sizeof(sa.v4));
		if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&sa.v6.sin6_addr))
			continue;
		tcp_accept_set_port(&sa, port);
		add_place(address, &sa);
	}
	return 0;
}

static int tcp_accept_address_make(struct tcp_transport *transport,
				   const union net_place *bound, bool any)
{
	const struct config *config = transport->net.base.env.config;
	in_port_t port = bound->any.sa_family == AF_INET6 ? bound->v6.sin6_port
							  : bound->v4.sin_port;
	struct tcp_address address = {0};
	union net_place sa;
	bool any_address;
	int r = 0;

	if (!any) {
		add_place(&address, bound);
	} else {
		if (*config->advertise &&
		    place_parse(config->advertise, &sa, &any_address) && !any_address) {
			tcp_accept_set_port(&sa, port);
			add_place(&address, &sa);
		}
		r = places_of_interfaces(&address, bound->any.sa_family, port);
	}
	if (r == 0 && address.count == 0)
		r = err_raise(ERR_REQUIRE, "tcp: no interface is up: set tcp_listen");
	if (r == 0)
		r = tcp_address_put(&address, transport->net.base.address,
				    &transport->net.base.address_len);
	return err_pass(r);
}

int tcp_port_open(struct tcp_transport *transport)
{
	const struct config *config = transport->net.base.env.config;
	const char *wanted = *config->tcp_listen ? config->tcp_listen : config->listen;
	cleanup_close int fd = -1;
	union net_place sa;
	socklen_t len;
	int one = 1, r;
	bool any;

	if (!place_parse(wanted, &sa, &any))
		return err_raise(ERR_REQUIRE, "tcp: %s is not tcp://ADDRESS:PORT",
				 wanted);
	if (!*config->tcp_listen)
		tcp_accept_set_port(&sa, 0); /* listen's is the handshake's */
	fd = socket(sa.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return err_raise_errno(errno, "tcp: socket");
	(void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, &sa.any, tcp_sockaddr_len(&sa)) < 0)
		return err_raise_errno(errno, "tcp: bind to %s", wanted);
	if (listen(fd, BACKLOG) < 0)
		return err_raise_errno(errno, "tcp: listen on %s", wanted);
	len = sizeof(sa);
	if (getsockname(fd, &sa.any, &len) < 0)
		return err_raise_errno(errno, "tcp: getsockname");
	r = tcp_accept_address_make(transport, &sa, any);
	if (r < 0)
		return err_pass(r);
	transport->acceptor.meet = tcp_door_meet;
	transport->acceptor.want_tick = tcp_door_want_tick;
	transport->acceptor.max = TCP_PENDING_MAX;
	transport->acceptor.hello_bytes = TCP_HELLO_BYTES;
	return err_pass(net_acceptor_listen(&transport->acceptor, 0, mem_steal_fd(&fd)));
}
