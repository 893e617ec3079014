/* SPDX-License-Identifier: Apache-2.0 */
/* cgroup: the memory limit of this process's control groups. */
#ifndef KVD_BASE_CGROUP_H
#define KVD_BASE_CGROUP_H

#include <stdint.h>

/* The least of the limits of its group and those above, of cgroup v2 and of v1's memory
 * controller, which may be mounted at the same time. UINT64_MAX: none. */
uint64_t cgroup_memory_limit(void);
/* The same with other folders than /proc/self and /sys/fs/cgroup. */
uint64_t cgroup_memory_limit_in(const char *self, const char *mounts);
/* The limit, or the machine's memory if that is less. */
uint64_t memory_limit(void);

#endif
