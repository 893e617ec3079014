/* SPDX-License-Identifier: Apache-2.0 */
/* etcd_server: an etcd of a test's own, on free ports, with a folder of its own. */
#ifndef KVD_TESTS_ETCD_SERVER_H
#define KVD_TESTS_ETCD_SERVER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct etcd_server {
	char dir[64]; /* data, log, certificates */
	char port[8], peer_port[8];
	bool tls;
	uint64_t quota;	    /* bytes; 0: etcd's default */
	const char *listen; /* address; NULL: 127.0.0.1 */
	const char *login;  /* USER:PASSWORD for etcd_ctl(); NULL */
	pid_t pid;	    /* 0: not running */
	const char *netns;  /* runs in that network namespace; NULL */
};

/* Skips the test where etcd or etcdctl is missing. */
void etcd_server_need(void);
/* Chooses a folder and ports. */
void etcd_server_init(struct etcd_server *server);
/* Starts it on what it has, and waits until it answers. */
void etcd_server_start(struct etcd_server *server);
/* The same without waiting. */
void etcd_server_launch(struct etcd_server *server);
void etcd_server_ready(struct etcd_server *server);
void etcd_server_stop(struct etcd_server *server, int signum); /* and waits for its end */
void etcd_server_wipe(struct etcd_server *server);	       /* its data */
void etcd_server_free(struct etcd_server *server);	       /* ends it, removes all */
/* etcdctl with these words; its status. `out`: what it says; NULL: is dropped. */
int etcd_ctl(const struct etcd_server *server, char *out, size_t size, const char *fmt,
	     ...) __attribute__((format(printf, 4, 5)));
/* A network namespace that a pair of interfaces connects with this one. */
int etcd_net_new(const char *name, const char *here, const char *there);
int etcd_net_up(const char *name, bool up);
void etcd_net_free(const char *name);
/* A CA, and certificates of server and client, by openssl; false: it is not there. */
bool etcd_server_certify(struct etcd_server *server);

#endif
