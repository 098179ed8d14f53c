// manifests checks Kubernetes manifests without a cluster: each document of standard input must
// decode strictly into the type of its kind, so unknown fields and wrong types are errors, such as a
// number where the type has a string. It prints the documents as a JSON array. The kinds of operators
// (CRDs) have any spec.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

var types = map[string]func() any{
	"v1 ConfigMap":                            func() any { return new(corev1.ConfigMap) },
	"v1 Pod":                                  func() any { return new(corev1.Pod) },
	"v1 Service":                              func() any { return new(corev1.Service) },
	"apps/v1 Deployment":                      func() any { return new(appsv1.Deployment) },
	"apps/v1 StatefulSet":                     func() any { return new(appsv1.StatefulSet) },
	"batch/v1 CronJob":                        func() any { return new(batchv1.CronJob) },
	"policy/v1 PodDisruptionBudget":           func() any { return new(policyv1.PodDisruptionBudget) },
	"networking.k8s.io/v1 NetworkPolicy":      func() any { return new(networkingv1.NetworkPolicy) },
	"monitoring.coreos.com/v1 ServiceMonitor": func() any { return new(custom) },
	"monitoring.coreos.com/v1 PrometheusRule": func() any { return new(custom) },
}

type custom struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              map[string]any `json:"spec"`
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "manifests:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	found := []any{}
	reader := utilyaml.NewYAMLReader(bufio.NewReader(in))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return json.NewEncoder(out).Encode(found)
		}
		if err != nil {
			return err
		}
		object, err := decode(document)
		if err != nil {
			return fmt.Errorf("document %d: %w", len(found)+1, err)
		}
		if object != nil {
			found = append(found, object)
		}
	}
}

// decode returns nil for a document without content.
func decode(document []byte) (any, error) {
	// As kubectl does: the values have the types of YAML. yaml.UnmarshalStrict would convert them.
	text, err := yaml.YAMLToJSONStrict(document)
	if err != nil {
		return nil, err
	}
	var head struct{ APIVersion, Kind string }
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, err
	}
	if head.Kind == "" && head.APIVersion == "" {
		return nil, nil
	}
	kind := head.APIVersion + " " + head.Kind
	newObject, known := types[kind]
	if !known {
		return nil, fmt.Errorf("unknown kind %q", kind)
	}
	object := newObject()
	wrong, err := kjson.UnmarshalStrict(text, object)
	if err := errors.Join(append(wrong, err)...); err != nil {
		return nil, fmt.Errorf("%s: %w", kind, err)
	}
	return object, nil
}
