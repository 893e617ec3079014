/* SPDX-License-Identifier: Apache-2.0 */
/* features: the features of this build, for --version and the configuration. */
#ifndef KVD_FEATURES_H
#define KVD_FEATURES_H

#include <stdio.h>

#include "daemon/base/context.h"

/* Names of the built-in transports, in default order, up to a NULL. */
void features_transports(const char *names[TRANSPORTS_MAX]);
void features_print(FILE *out);

#endif
